"""Agent loops in processes of their own: the batch, its failures and its early stop are those of one process."""

from __future__ import annotations

import asyncio
import os
import signal
from textwrap import dedent

import numpy as np
import pytest

from tests.harness.models import tiny_model_dir
from tests.harness.rows import columns, write_prompts
from verl.agent_loop import AgentLoopManager
from verl.agent_loop.runner import RunnerLostError
from verl.config import load_config, replace
from verl.data import tokenizer_of
from verl.errors import ConfigError, RolloutError, WorkerError
from verl.protocol import DataProto
from verl.rollout import Completion, Request, SamplingParams
from verl.single_controller.base import ClassWithInitArgs, ResourcePool
from verl.single_controller.local import LocalWorkerGroup
from verl.single_controller.local.handle import LocalHandle
from verl.workers.loops import RemoteRunner, RolloutWorker
from verl.workers.replica import frees_cache
from verl.workers.sampling import SamplingWorker

pytestmark = pytest.mark.slow
R = "actor_rollout_ref.rollout"


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tiny_model_dir(tmp_path_factory.mktemp("loops") / "model")
    words = [
        f"actor_rollout_ref.model.path={folder}",
        f"{R}.agent.default_agent_loop=tests.workers.own_loop.Moody",
        f"{R}.over_sample_rate=0.5",
        f"data.train_files={write_prompts(folder.parent / 'rows.parquet', 4)}",
        "data.max_response_length=6",
        "algorithm.adv_estimator=grpo",
        f"{R}.n=2",
        "trainer.device=cpu",
    ]
    return load_config("ppo_trainer", words)


@pytest.fixture(scope="module")
def here(config) -> LocalWorkerGroup:
    group = LocalWorkerGroup(ResourcePool([1]), sampling(config))
    group.init_model()
    return group


@pytest.fixture(scope="module")
def apart(config, own_ray_folder):
    """A sampling worker with two processes for its loops, all on Ray."""
    from verl.single_controller import ray as cluster

    cluster.start_cluster([1], "cpu", {"address": "local", "num_cpus": 2, "object_store_memory": 200 << 20})
    try:
        group = cluster.RayWorkerGroup(cluster.RayResourcePool([1], use_gpu=False), sampling(config))
        group.init_model()
        arguments = {"config": config.actor_rollout_ref, "data": config.data, "service": group.handle(0)}
        group.loops = group.start_helpers(ClassWithInitArgs(RolloutWorker, **arguments), 2, "agent_loop")
        group.connect({}, group.loops)
        yield group
    finally:
        cluster.stop_cluster()


def sampling(config) -> ClassWithInitArgs:
    return ClassWithInitArgs(SamplingWorker, config=config.actor_rollout_ref, data=config.data)


def batch(moods: list[str], **meta) -> DataProto:
    """Two samples of each prompt."""
    halves = [i // 2 for i in range(len(moods))]
    ids = [[5 + half, 7, 9 + half] for half in halves]
    uids = [f"row {half}" for half in halves]
    return DataProto.from_dict(non_tensors=columns(raw_prompt_ids=ids, uid=uids, mood=moods), meta_info=meta)


def test_two_processes_make_the_batch_of_one_bit_for_bit_with_the_same_row_failed(here, apart):
    asked = batch(["fine", "fine", "fails", "fine", "fine", "fine", "fine", "fine"], validate=True)
    expected, got = here.generate_sequences(asked), apart.generate_sequences(asked)
    assert set(got.batch.keys()) == set(expected.batch.keys()) >= {"responses", "rollout_log_probs", "token_versions"}
    for name, tensor in expected.batch.items():
        assert tensor.equal(got.batch[name]), name
    columns, others = expected.non_tensor_batch, got.non_tensor_batch
    for name in set(columns) - {"process"}:
        assert list(columns[name]) == list(others[name]), name
    assert others["finish_reason"][2] == "abort" and "Strange: no mood for it" in others["agent_error"][2]
    processes = [number for number in others["process"] if number is not None]
    first, second = processes[0], processes[-1]
    assert processes == [first] * 3 + [second] * 4 and len({first, second, os.getpid()}) == 3
    measured, expected_metrics = got.meta_info["metrics"], expected.meta_info["metrics"]
    assert set(measured) == set(expected_metrics)
    for name in ("rollout/sampled_tokens", "rollout/agent/failed", "rollout/finish_reason/abort"):
        assert measured[name].value == expected_metrics[name].value, name


def test_a_batch_ends_for_all_processes_once_enough_of_its_rows_are_done(apart):
    done = apart.generate_sequences(batch(["endless", "fine", "waits", "fine"]))
    assert list(done.non_tensor_batch["finish_reason"][[0, 2]]) == ["abort", "abort"]
    assert "abort" not in done.non_tensor_batch["finish_reason"][[1, 3]]
    after = apart.generate_sequences(batch(["fine"] * 4, validate=True))
    assert "abort" not in after.non_tensor_batch["finish_reason"], "the stop was that batch's"


def test_loops_elsewhere_hear_of_the_end_of_a_batch_before_their_requests_come_back_empty(config):
    """Else an agent would take its own end for a failure, which ``on_error`` may make one of the run."""
    is_known = []

    class Sampling:
        async def generate(self, request):
            return Completion(request.id, (7,), (-0.1,), "stop", (0,))

        async def abort(self, request_ids=None):
            is_known.append(worker._stop.is_set)

    policy = config.actor_rollout_ref
    manager = AgentLoopManager(policy.rollout, Sampling(), tokenizer_of(policy.model))
    worker = RolloutWorker(policy, None, LocalHandle(manager))
    manager.run_in([RemoteRunner(LocalHandle(worker))])
    for _ in range(2):
        made = asyncio.run(asyncio.wait_for(manager.generate(batch(["waits", "fine"])), 20))
        assert list(made.non_tensor_batch["finish_reason"]) == ["abort", "stop"]
    assert is_known == [True, True]


def test_rows_that_all_fail_and_a_loop_that_there_is_not_stop_the_run_as_in_one_process(here, apart):
    unknown = batch(["fine", "fine"], validate=True)
    unknown.non_tensor_batch["agent_name"] = np.array(["nobody", "nobody"], dtype=object)
    for group in (here, apart):
        with pytest.raises(RolloutError, match=r"all 2 rollouts of a batch failed.*Strange: no mood for it"):
            group.generate_sequences(batch(["fails", "fails"], validate=True))
        with pytest.raises(ConfigError, match=r"unknown agent loop.*nobody"):
            group.generate_sequences(unknown)


def test_rows_of_a_process_of_agent_loops_that_is_killed_are_run_by_the_others_with_the_same_result(here, apart):
    asked = batch(["fine"] * 4, validate=True)
    expected = here.generate_sequences(asked).batch["responses"]
    for process in apart.loops[1]._fleet.members:  # after the second one they run beside the sampler
        os.kill(process.pid, signal.SIGKILL)
        got = apart.generate_sequences(asked)
        assert got.batch["responses"].equal(expected)
        assert "abort" not in got.non_tensor_batch["finish_reason"]


async def test_the_request_of_a_lost_process_is_given_up_for_that_of_the_row_that_runs_anew(config):
    class Sampling:
        def __init__(self):
            self.aborted, self.in_flight = asyncio.Event(), set()

        async def generate(self, request):
            assert request.id not in self.in_flight, "a request with this id is in flight"
            self.in_flight.add(request.id)
            if request.priority == 1:
                await self.aborted.wait()
            self.in_flight.remove(request.id)
            return Completion(request.id, (request.priority,), (-0.1,), "stop", (0,))

        async def abort(self, request_ids=None):
            assert request_ids == ["a-0-0"]
            self.aborted.set()

    policy = config.actor_rollout_ref
    manager = AgentLoopManager(policy.rollout, Sampling(), tokenizer_of(policy.model))
    first = asyncio.ensure_future(manager.serve(Request("a-0-0", (1,), SamplingParams(), priority=1)))
    await asyncio.sleep(0)
    second = await asyncio.wait_for(manager.serve(Request("a-0-0", (1,), SamplingParams(), priority=2)), 20)
    await first
    assert second.token_ids == (2,) and not manager._served


def test_a_row_whose_second_process_is_lost_too_ends_the_call(config):
    class Lost:
        async def run(self, number, *rest):
            raise RunnerLostError(f"the process that ran row {number} is lost")

    policy = config.actor_rollout_ref
    manager = AgentLoopManager(policy.rollout, None, tokenizer_of(policy.model))
    manager.run_in([Lost(), Lost()])
    with pytest.raises(RunnerLostError, match="the process that ran row 0 is lost"):
        asyncio.run(manager.generate(batch(["fine"])))


def test_what_an_external_library_registers_is_known_where_agent_loops_run(config, tmp_path, monkeypatch):
    code = """
        from tests.workers.own_loop import Moody
        from verl.agent_loop import register
        register("moody_of_a_library")(Moody)
    """
    (tmp_path / "library_of_loops.py").write_text(dedent(code))
    monkeypatch.syspath_prepend(tmp_path)
    words = {"model.external_lib": "library_of_loops", "rollout.agent.default_agent_loop": "moody_of_a_library"}
    worker = RolloutWorker(replace(config.actor_rollout_ref, **words), None, LocalHandle(None))
    output = asyncio.run(worker.run_row(0, 0, {"raw_prompt_ids": [5], "mood": "fails"}, ("a", 0), {}))
    assert "no mood for it" in str(output.failure)


def test_a_run_of_one_process_has_no_other_processes_to_start(here):
    with pytest.raises(WorkerError, match=r"trainer.runtime=ray"):
        here.start_helpers(ClassWithInitArgs(dict), 2, "agent_loop")


@pytest.mark.parametrize(
    ("setting", "device", "weight_bytes", "frees"),
    [
        (None, "cuda", 1, True),
        (None, "cpu", 255 << 20, False),
        (None, "cpu", 256 << 20, True),
        (True, "cpu", 1, True),
        (False, "cuda", 1 << 30, False),
    ],
)
def test_a_sampler_frees_its_caches_for_a_trainer_where_they_are_large(setting, device, weight_bytes, frees):
    assert frees_cache(setting, device, weight_bytes) == frees
