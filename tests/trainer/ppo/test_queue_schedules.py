"""The schedules with a queue in one process: what is sampled when, what is refused, and what a checkpoint holds."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.harness.runs import Seen, differing, train
from tests.harness.scorers import scorer
from tests.harness.waiting import wait_until
from verl.agent_loop.failed import RunStops
from verl.config import load_config
from verl.config.machine.pools import Pools, PoolSpec
from verl.errors import ConfigError, DataError, RewardError, RolloutError
from verl.metrics import notices, reset_notices
from verl.protocol import DataProto
from verl.single_controller.base import Role, interrupts
from verl.trainer.build import worker_arguments
from verl.trainer.ppo import schedules, stages
from verl.trainer.ppo.admission import BoundBroken, GroupAdmission, GroupQueue
from verl.trainer.ppo.context import RunState
from verl.trainer.ppo.driver import Concurrent, Driver
from verl.trainer.ppo.groups import Done, GroupRows, check_not_starved, together
from verl.trainer.ppo.schedules import COLOCATE_ASYNC, FULLY_ASYNC, SEPARATE_ASYNC
from verl.trainer.ppo.stream import GroupStream
from verl.trainer.signals import RunStopped

MODE = "trainer.v1.trainer_mode"
BASE = ("trainer.total_training_steps=4", "actor_rollout_ref.rollout.n=2", "actor_rollout_ref.actor.optim.lr=1e-2")
HALVES = ("async_training.trigger_parameter_sync_step=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2")
STREAM = (f"{MODE}=fully_async", "async_training.staleness_threshold=0.5", *HALVES)
pytestmark = pytest.mark.usefixtures("shared_here")


def run(folder: str, *changes: str) -> Seen:
    return train(
        *BASE, *changes, f"trainer.default_local_dir={folder}", "trainer.save_freq=1", "trainer.resume_mode=auto"
    )


def versions(seen: Seen) -> list[list[int]]:
    """Of every row of every step; each was drawn by one version."""
    columns = [batch.batch["token_versions"].amax(-1).tolist() for batch in seen.batches]
    return [[column[row] for row in range(0, len(column), 2)] for column in columns]


def same(one: str, other: str) -> bool:
    return not differing(f"{one}/global_step_4/actor", f"{other}/global_step_4/actor")


@pytest.fixture(scope="module")
def stream() -> Seen:
    return run("stream", *STREAM)


def test_with_nothing_sampled_ahead_the_weights_are_those_of_the_synchronous_schedule():
    run("sync", "trainer.skip_old_log_prob=false")
    run("still", f"{MODE}=colocate_async", "trainer.v1.colocate_async.num_warmup_batches=0")
    assert same("still", "sync")


def test_which_version_draws_what_follows_from_counts(stream):
    """T = 4 groups in chunks of 2, half a step ahead: 6 groups at first, then 4 with every version."""
    assert versions(stream) == [[0, 0, 0, 0], [0, 0, 1, 1], [1, 1, 2, 2], [2, 2, 3, 3]]
    assert [step["fully_async/staleness/mean"] for step in stream.metrics] == [0, 0.5, 0.5, 0.5]
    assert [step["fully_async/staleness/share_1"] for step in stream.metrics] == [0, 0.5, 0.5, 0.5]
    assert [step["count/staleness_samples"] for step in stream.metrics] == [0, 4, 4, 4]
    assert [step["count/total_generated_samples"] for step in stream.metrics] == [12, 20, 28, 32]
    assert [step["fully_async/queue/groups"] for step in stream.metrics] == [2, 2, 2, 0]
    assert [step["training/off_policy/trajectory_staleness/max"] for step in stream.metrics] == [0, 1, 1, 1]


def test_a_step_in_chunks_reports_what_a_step_at_once_does():
    """Without a learning rate both have the same samples and log-probs, so that every number is one of the batch."""
    same_batch = ("trainer.total_training_steps=1", "actor_rollout_ref.actor.optim.lr=0.0", "trainer.save_freq=-1")
    weighed = ("algorithm.rollout_is_threshold=2", "actor_rollout_ref.rollout.dtype=bfloat16")
    chunks = (*STREAM[:1], *HALVES, "async_training.staleness_threshold=0")
    at_once, in_chunks = (
        train(*BASE, *same_batch, *weighed, "trainer.skip_old_log_prob=false", *words).metrics[0]
        for words in (HALVES[1:], chunks)
    )
    assert at_once["mismatch/rollout_is_p95"] > 1.0005, "the two policies differ"
    varies = ("timing", "perf/", "training/num_gen")
    names = [name for name in at_once if not name.startswith(varies) or name == "perf/total_num_tokens"]
    assert {name: in_chunks.get(name) for name in names} == pytest.approx({name: at_once[name] for name in names})


def test_a_batch_of_warm_up_makes_samples_one_version_old_and_another_half_makes_some_two():
    single = ("actor_rollout_ref.actor.ppo_mini_batch_size=1", "data.gen_batch_size=1")
    one = train(*BASE, f"{MODE}=separate_async", *single)
    assert versions(one) == [[0] * 4, [0] * 4, [1] * 4, [2] * 4]
    more = train(*BASE, f"{MODE}=colocate_async", "trainer.v1.colocate_async.num_warmup_batches=1.5")
    assert versions(more) == [[0] * 4, [0] * 4, [0, 0, 1, 1], [1, 1, 2, 2]]


@pytest.mark.parametrize("stop", [1, 3])
def test_a_resumed_run_has_the_same_weights_bit_for_bit_and_no_prompt_twice(stream, stop):
    folder = f"resumed_{stop}"
    shutil.copytree("stream", folder)
    for step in range(stop + 1, 5):
        shutil.rmtree(Path(folder, f"global_step_{step}"))
    Path(folder, "latest_checkpointed_iteration.txt").write_text(str(stop))
    later = run(folder, *STREAM)
    assert len(later.batches) == 4 - stop and same(folder, "stream")
    seen = Counter(uid for batch in [*stream.batches[:stop], *later.batches] for uid in batch.non_tensor_batch["uid"])
    assert seen == Counter(uid for batch in stream.batches for uid in batch.non_tensor_batch["uid"])
    assert set(seen.values()) == {2}


def test_a_signal_between_two_chunks_lets_the_step_end_and_the_run_goes_on_bit_for_bit(stream, monkeypatch):
    def hit(batch, roles, ctx):
        if ctx.step == 2 and ctx.goes_on:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch, pytest.raises(RunStopped, match="143") as stopped:
        patch.setattr(schedules, "FULLY_ASYNC", dataclasses.replace(FULLY_ASYNC, stages=(hit,)))
        train(*BASE, *STREAM, "trainer.default_local_dir=hit", "trainer.save_freq=100", "trainer.resume_mode=auto")
    assert "stopped after step 2" in stopped.value.sentence
    later = run("hit", *STREAM)
    assert len(later.batches) == 2 and same("hit", "stream")


def test_a_run_without_queue_trains_on_what_waited_in_one_and_says_what_it_leaves_out(stream):
    """Step 2 of the stream leaves one of step 3's two chunks: two groups that version 1 drew."""
    shutil.copytree("stream/global_step_2", "leaves_queue/global_step_2")
    reset_notices()
    sync = run("leaves_queue", f"{MODE}=sync", "trainer.resume_changed=accept", "trainer.total_training_steps=3")
    (batch,) = sync.batches
    waited = stream.batches[2].non_tensor_batch["uid"].tolist()[:4]
    assert batch.non_tensor_batch["uid"].tolist()[:4] == waited and versions(sync) == [[1, 1, 2, 2]]
    assert "first 4 samples" in notices()[f"{MODE}, resumed run"]


def test_a_queue_whose_bound_is_smaller_than_that_of_the_checkpoint_is_refused_by_name(stream):
    shutil.copytree("stream/global_step_2", "smaller/global_step_2")
    with pytest.raises(ConfigError, match="one would be trained on 1 versions late: this run allows 0"):
        run("smaller", *STREAM, "async_training.staleness_threshold=0", "trainer.resume_changed=accept")


def test_groups_that_were_left_out_before_a_resume_do_not_starve_the_queue_after_it():
    made = load_config("ppo_trainer", ["data.train_files=train.parquet", "actor_rollout_ref.model.path=model",
                                       *STREAM, "data.train_batch_size=4"])  # fmt: skip
    state = RunState(made, reward=lambda batch: {}, total_steps=9, step=5)
    stream, later = (GroupStream(FULLY_ASYNC.admission(made), state, version=5) for _ in range(2))
    stream.queue.counts["filtered"] = 1000
    stream.queue.admit(GroupRows.of(DataProto.from_dict(tensors={"prompts": torch.ones(1, 2)})))
    later.load_state(stream.state())
    check_not_starved(later.queue, later._lost, state.open(6))


def test_groups_of_which_one_tells_more_than_another_are_one_batch():
    """The reason why a conversation ended, or a detail of the score, is a column of those groups that have one."""
    parts = [
        DataProto.from_dict(
            {"responses": torch.full((2, 1), row), **more}, {"uid": np.array(["a", "a"], dtype=object), **columns}
        )
        for row, more, columns in (
            (0, {"rm_scores": torch.ones(2, 1)}, {"ended": np.array(["limit", None], dtype=object)}),
            (1, {}, {"acc": np.array([1.0, 0.0], dtype=object)}),
        )
    ]
    batch = together(parts)
    assert batch.non_tensor_batch["ended"].tolist() == ["limit", None, None, None]
    assert batch.non_tensor_batch["acc"].tolist() == [None, None, 1.0, 0.0]
    assert set(batch.batch.keys()) == {"responses"}
    assert batch.batch["responses"].flatten().tolist() == [0, 0, 1, 1]
    assert "acc" not in parts[0].non_tensor_batch


class Slow:
    """A sampler's handle: each call ends when the test says so."""

    def __init__(self):
        self.go, self.begun, self.cancelled, self.failed = threading.Event(), 0, 0, 0

    async def call(self, method, asked):
        self.begun += 1
        try:
            while not self.go.is_set():
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            await asyncio.sleep(0.05)  # a call of a worker is cancelled there
            self.cancelled += 1
            raise
        self.failed += 1
        raise RolloutError("no answer")


def test_groups_in_flight_are_waited_for_amid_a_step_even_after_a_signal_and_cancelled_at_the_end():
    config = load_config("ppo_trainer", ["data.train_files=train.parquet", "actor_rollout_ref.model.path=model"])
    ctx = RunState(config, reward=lambda batch: {}, total_steps=9).open(3)
    prompt = GroupRows.of(DataProto.from_dict(non_tensors={"uid": np.array(["a"], dtype=object)}))
    slow = Slow()
    driver = Concurrent({"rollout": SimpleNamespace(group=SimpleNamespace(handle=lambda rank: slow))}, limit=2)
    driver.begin({0: prompt, 1: prompt}, ctx)
    ctx.run.stop.signal = signal.SIGTERM
    assert driver.results(ctx, wait=True) == [] and driver.in_flight == 2
    threading.Timer(0.3, slow.go.set).start()
    assert driver.results(ctx, wait=True, may_stop=False)[0].why == "failed"
    wait_until(lambda: slow.failed == 2)  # the other call looks a moment later
    slow.go.clear()
    before = slow.begun
    driver.begin({2: prompt}, ctx)
    wait_until(lambda: slow.begun > before)
    driver.close()
    assert slow.cancelled == 1 and not [one for one in threading.enumerate() if one.name == "verl-groups"]


def test_a_group_that_fails_is_sampled_once_more_before_its_prompt_is_left_out():
    config = load_config("ppo_trainer", ["data.train_files=train.parquet", "actor_rollout_ref.model.path=model"])
    ctx = RunState(config, reward=lambda batch: {}, total_steps=9).open(3)
    prompt = GroupRows.of(DataProto.from_dict(non_tensors={"uid": np.array(["a"], dtype=object)}))
    begun: list[int] = []

    class Failing(Driver):
        def sample(self, prompts, ctx, follow, enough):
            begun.extend(prompts)

        def ended(self, ctx, wait, may_stop):
            return [Done(number, prompt, why="failed") for number in {*begun}]

    stream = GroupStream(GroupAdmission(groups=2, chunk=1), ctx.run, version=0)
    stream._driver = Failing()
    begun.append(stream.queue.admit(prompt))
    stream.take_in(ctx, wait=True)
    assert begun == [0, 0] and len(stream.queue) == 1 and not stream.queue.lost
    stream.take_in(ctx, wait=True)
    assert begun == [0, 0] and not len(stream.queue) and stream.queue.counts["failed"] == 1


def test_an_error_of_a_group_that_is_scored_beside_training_ends_the_waiting_for_the_update(monkeypatch):
    """As a call of workers does, the update here looks now and then whether it is still waited for."""
    config = load_config("ppo_trainer", ["data.train_files=train.parquet", "actor_rollout_ref.model.path=model"])
    ctx = RunState(config, reward=lambda batch: {}, total_steps=9).open(3)
    prompt = GroupRows.of(DataProto.from_dict(non_tensors={"uid": np.array(["a"], dtype=object)}))

    trained = []

    def training():
        for _ in range(3000):
            interrupts.current().check()
            time.sleep(0.02)
        trained.append("to its end")

    def broken(*_):
        raise RewardError("rewards.py, line 3: it failed on row 7")

    monkeypatch.setattr(Concurrent, "_scored", broken)
    monkeypatch.setattr(stages, "with_answers", lambda asked, made, metrics: made)
    answering = SimpleNamespace(call=lambda method, asked: asyncio.sleep(0.1, asked))
    driver = Concurrent({"rollout": SimpleNamespace(group=SimpleNamespace(handle=lambda rank: answering))}, limit=2)
    stream = GroupStream(GroupAdmission(groups=1, chunk=1), ctx.run, version=0)
    stream._driver = driver
    driver.begin({0: prompt}, ctx)
    with pytest.raises(RewardError, match="it failed on row 7"):
        stream.during(training, ctx)
    assert not trained, "it was not waited for"


def test_an_agent_loop_whose_failures_are_to_stop_the_run_ends_it_with_its_first_one():
    """Other failures of a sampler are the group's: the eighth in a row ends the run."""
    config = load_config("ppo_trainer", ["data.train_files=train.parquet", "actor_rollout_ref.model.path=model"])
    ctx = RunState(config, reward=lambda batch: {}, total_steps=9).open(3)
    prompt = GroupRows.of(DataProto.from_dict(non_tensors={"uid": np.array(["a"], dtype=object)}))
    calls: list[BaseException] = []

    async def call(method, asked):
        calls.append(errors.pop(0))
        raise calls[-1]

    handle = SimpleNamespace(call=call)
    driver = Concurrent({"rollout": SimpleNamespace(group=SimpleNamespace(handle=lambda rank: handle))}, limit=1)
    errors = [RolloutError("all 2 rollouts of a batch failed"), RunStops("the games failed on row 1, uid a: KeyError")]
    driver.begin({0: prompt}, ctx)
    assert [done.why for done in driver.results(ctx, wait=True)] == ["failed"] and not driver.failed.is_set
    driver.begin({1: prompt}, ctx)
    with pytest.raises(RunStops, match="the games failed on row 1"):
        driver.results(ctx, wait=True)
    driver.close()
    assert len(calls) == 2 and driver.failed.is_set
    driver.close()


def test_no_more_groups_are_sampled_at_once_than_the_limit_allows():
    async def turn():
        """Of the loop: what was ready before it has run."""

    config = load_config("ppo_trainer", ["data.train_files=train.parquet", "actor_rollout_ref.model.path=model"])
    run = RunState(config, reward=lambda batch: {}, total_steps=9)
    slow = Slow()
    driver = Concurrent({"rollout": SimpleNamespace(group=SimpleNamespace(handle=lambda rank: slow))}, 2)
    prompt = GroupRows.of(DataProto.from_dict(non_tensors={"uid": np.array(["a"], dtype=object)}))
    driver.begin(dict.fromkeys(range(6), prompt), run.open(1))
    wait_until(lambda: slow.begun >= 2)
    for _ in range(10):
        asyncio.run_coroutine_threadsafe(turn(), driver._loop).result()  # for one more if it came
    assert slow.begun == 2
    driver.close()


def test_groups_without_signal_make_room_for_others_and_a_queue_of_them_alone_is_one_error(tmp_path, monkeypatch):
    Path("flat.py").write_text(scorer("1.0"))
    filters = ("algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=seq_reward")
    seen = train(*BASE, *STREAM, *filters)
    assert [len(batch) for batch in seen.batches] == [8] * 4
    assert sum(step["training/filter_groups/dropped_groups"] for step in seen.metrics) > 0
    assert all(step["training/off_policy/trajectory_staleness_worst/max"] <= 1 for step in seen.metrics)
    with pytest.raises(DataError, match="the queue starves: since the last update 12 groups") as error:
        train(*BASE, *STREAM, *filters, "algorithm.filter_groups.max_num_gen_batches=2",
              "reward.custom_reward_function.path=flat.py")  # fmt: skip
    assert error.value.key == "algorithm.filter_groups.max_num_gen_batches"


def test_a_queue_that_keeps_one_group_of_many_goes_on_with_a_notice_and_one_that_keeps_none_ends_the_run():
    needed = ["data.train_files=train.parquet", "actor_rollout_ref.model.path=model", "data.train_batch_size=4"]
    filters = ["algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=acc"]
    ctx = RunState(load_config("ppo_trainer", [*needed, *STREAM, *filters]), reward=lambda batch: {}, total_steps=9)
    queue = GroupQueue(GroupAdmission(groups=4, chunk=2))

    def filtered(groups: int) -> None:
        for _ in range(groups):
            queue.lose(queue.admit("a prompt"), "filtered")

    filtered(30)
    queue.complete(queue.admit("a prompt"), "its samples")
    reset_notices()
    filtered(49)
    check_not_starved(queue, 0, ctx.open(3))
    assert not notices()
    filtered(1)
    check_not_starved(queue, 0, ctx.open(3))
    said = notices()["algorithm.filter_groups.max_num_gen_batches"]
    assert "80 groups of samples were left out" in said
    assert "in acc, 0 because sampling or scoring failed), and 1 of the 2 that are trained on at once are there" in said
    assert "max_num_gen_batches=20 the run ends here" in said and "change the data, or the filter" in said
    hopeless = GroupQueue(GroupAdmission(groups=4, chunk=2))
    for _ in range(80):
        hopeless.lose(hopeless.admit("a prompt"), "filtered")
    with pytest.raises(DataError, match=r"starves: since the last update 80 groups .* in acc, .* 0 of the 2"):
        check_not_starved(hopeless, 0, ctx.open(3))


def test_a_rule_that_admits_too_much_is_caught_on_the_groups_and_on_the_tokens(monkeypatch):
    room = GroupQueue.room
    monkeypatch.setattr(GroupQueue, "room", lambda self: room(self) + self.bound.groups)
    with pytest.raises(BoundBroken, match="2 versions, where 1 are allowed"):
        train(*BASE, f"{MODE}=colocate_async")
    monkeypatch.setattr("verl.trainer.ppo.admission.check_version", lambda *_: None)
    with pytest.raises(RolloutError, match="step 3 trains version 2, and a sample has tokens of version 0"):
        train(*BASE, f"{MODE}=colocate_async")


@pytest.mark.parametrize(
    ("words", "key", "arithmetic"),
    [
        ((f"{MODE}=separate_async",), "trainer.v1.separate_async.parameter_sync_step", "x 4 prompts = 16"),
        (
            (f"{MODE}=colocate_async", "trainer.v1.colocate_async.num_warmup_batches=2.5",
             "trainer.v1.sampler.max_off_policy_threshold=2"),
            "trainer.v1.sampler.max_off_policy_threshold",
            "2.5 warm-up batches x 4 prompts = 10 prompts .* up to 3 versions old",
        ),
        ((*STREAM, "async_training.staleness_threshold=-1"), "async_training.staleness_threshold", "0 or more"),
        ((*STREAM, "algorithm.adv_estimator=opo"), "algorithm.adv_estimator", "samples of older versions"),
        (
            (*STREAM, "async_training.partial_rollout=true", "actor_rollout_ref.rollout.calculate_log_probs=false"),
            "actor_rollout_ref.rollout.calculate_log_probs",
            "log-probs",
        ),
        (
            (*STREAM, "trainer.v1.sampler.order=completion", "trainer.v1.sampler.max_off_policy_strategy=reweight"),
            "trainer.v1.sampler.max_off_policy_strategy",
            "nothing corrects",
        ),
        (
            (f"{MODE}=colocate_async", "trainer.v1.sampler.order=completion",
             "trainer.v1.sampler.max_off_policy_threshold=null"),
            "trainer.v1.sampler.max_off_policy_threshold",
            "nothing corrects for their age",
        ),
        ((*STREAM, "actor_rollout_ref.rollout.over_sample_rate=0.1"), "rollout.over_sample_rate", "on their own"),
    ],
)  # fmt: skip
def test_what_a_queue_cannot_keep_is_refused_before_anything_starts(words, key, arithmetic):
    needed = ["data.train_files=train.parquet", "actor_rollout_ref.model.path=model", "data.train_batch_size=4"]
    with pytest.raises(ConfigError, match=arithmetic) as error:
        load_config("ppo_trainer", [*needed, "actor_rollout_ref.actor.ppo_mini_batch_size=4", *words])
    assert key in str(error.value)


def test_the_bounds_that_settings_mean():
    def bound(schedule, *words):
        needed = ["data.train_files=train.parquet", "actor_rollout_ref.model.path=model"]
        return schedule.admission(load_config("ppo_trainer", [*needed, *words]))

    sized = ("data.train_batch_size=64", "actor_rollout_ref.actor.ppo_mini_batch_size=16")
    made = bound(FULLY_ASYNC, f"{MODE}=fully_async", "data.train_batch_size=0", sized[1], "data.gen_batch_size=1")
    assert (made.groups, made.chunk, made.limit(version=0), made.allowed, made.in_order) == (64, 16, 70, 1, True)
    bypass = "algorithm.rollout_correction.bypass_mode=true"
    whole, single = (bound(SEPARATE_ASYNC, f"{MODE}=separate_async", *sized, *more) for more in ((), (bypass,)))
    assert (whole.chunk, single.chunk, whole.allowed) == (64, 16, 1)
    rules = ("trainer.v1.sampler.order=completion", "trainer.v1.sampler.max_off_policy_threshold=3")
    loose = bound(COLOCATE_ASYNC, f"{MODE}=colocate_async", *sized, *rules)
    assert loose == GroupAdmission(64, 64, 1, staleness=3, in_order=False, overdue="drop") and loose.allowed == 3


def test_nodes_of_the_samplers_are_a_pool_of_their_own_under_separate_async_and_keep_their_caches():
    """And a batch of prompts to draw from says nothing of the batch to train on."""
    needed = ["data.train_files=train.parquet", "actor_rollout_ref.model.path=model", "trainer.runtime=ray"]
    sized = ["data.train_batch_size=4", "data.gen_batch_size=1", "actor_rollout_ref.actor.ppo_mini_batch_size=1"]
    rollout = "actor_rollout_ref.rollout"
    pool = [f"{rollout}.nnodes=1", f"{rollout}.n_gpus_per_node=2", f"{rollout}.free_cache_engine=true",
            f"{rollout}.checkpoint_engine.backend=gloo"]  # fmt: skip
    reset_notices()
    config = load_config("ppo_trainer", [*needed, *sized, f"{MODE}=separate_async", *pool])
    assert Pools.of(config).of_role("rollout") == PoolSpec("rollout_pool", (2,)) and config.data.train_batch_size == 4
    assert "hybrid_engine=false" in notices()[f"{rollout}.nnodes"]
    assert "sample while the trainers train" in notices()[f"{rollout}.free_cache_engine"]
    sampler = worker_arguments(config, Role.Rollout, 1, "cpu")["config"]
    assert sampler.rollout.free_cache_engine is False and SEPARATE_ASYNC.steps_of(config, 64) == 16
    with pytest.raises(ConfigError, match="have no nodes of their own to fill"):
        load_config("ppo_trainer", [*needed, *pool])


def test_settings_of_another_schedule_are_worth_a_notice_each():
    needed = ["data.train_files=train.parquet", "actor_rollout_ref.model.path=model"]
    others = ["trainer.v1.separate_async.parameter_sync_step=3", "trainer.v1.colocate_async.num_warmup_batches=2",
              "actor_rollout_ref.rollout.n_gpus_per_node=2"]  # fmt: skip
    reset_notices()
    load_config("ppo_trainer", [*needed, *others])
    assert all("has no effect with" in notices()[word.partition("=")[0]] for word in others)
