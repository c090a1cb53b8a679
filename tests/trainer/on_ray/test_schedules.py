"""Schedules with a queue on Ray beside a sampler pool of their own: the numbers of one process, and real delays.

Worker processes are handed from run to run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.harness.scorers import LETTERS
from tests.trainer.on_ray.kept import Kept, kept_processes
from tests.trainer.on_ray.test_sglang import assert_each_version_came_once, log, noted_in  # noqa: F401  # a fixture
from verl.config import load_config
from verl.protocol import DataProto
from verl.trainer.main_ppo import TaskRunner, run_ppo
from verl.trainer.ppo.callbacks import Callback

pytestmark = pytest.mark.slow
R, MODE = "actor_rollout_ref.rollout", "trainer.v1.trainer_mode"
SETTINGS = (
    "algorithm.adv_estimator=grpo",
    "algorithm.rollout_correction.bypass_mode=true",
    "data.train_files=train.parquet",
    "data.shuffle=false",
    "data.max_prompt_length=64",
    "data.max_response_length=6",
    "actor_rollout_ref.model.path=model",
    f"{R}.n=2",
    f"{R}.calculate_log_probs=true",
    "actor_rollout_ref.actor.optim.lr=1e-2",
    "actor_rollout_ref.actor.checkpoint.save_contents=[model]",
    "reward.custom_reward_function.path=scorer.py",
    "trainer.device=cpu",
    "trainer.logger=[]",
)
OWN_POOL = (
    "trainer.runtime=ray",
    "actor_rollout_ref.hybrid_engine=false",
    f"{R}.nnodes=1",
    f"{R}.n_gpus_per_node=1",
    f"{R}.checkpoint_engine.backend=shared_memory",
)
STREAM = (
    f"{MODE}=fully_async",
    "async_training.staleness_threshold=1",
    "async_training.trigger_parameter_sync_step=1",
)
SLOW = '''"""The hf sampler; with the first update's weights a pass takes long, as those of large models do."""
import time
from verl.rollout.hf.sampler import HFSampler

plain = HFSampler._step

def step(self):
    if self.version == 1:
        time.sleep(0.1)
    return plain(self)

HFSampler._step = step
'''
LATE = '''import asyncio
from verl.agent_loop.single_turn import SingleTurnAgentLoop

class LateLoop(SingleTurnAgentLoop):
    """Before the first prompt is answered its environment takes a second and a half."""

    async def run(self, sampling_params, **kwargs):
        if kwargs["index"] == 0:
            await asyncio.sleep(1.5)
        return await super().run(sampling_params, **kwargs)
'''


class Seen(Callback):
    """The batches that steps were trained on, and where the run's checkpoints are."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.batches: list[DataProto] = []

    def on_step_end(self, trainer: Any, batch: DataProto) -> None:
        self.batches.append(batch.select())

    def prompts(self) -> list[list[int]]:
        """Which prompts each step was trained on, one number for a group."""
        return [list(batch.non_tensor_batch["index"][::2]) for batch in self.batches]

    def staleness(self) -> list[list[int]]:
        """Of each step's groups, in versions, each by its oldest token."""
        every = []
        for step, batch in enumerate(self.batches):
            versions = batch.tensors["token_versions"].masked_fill(batch.tensors["token_versions"] < 0, step)
            every.append((step - versions.amin(-1)).reshape(-1, 2).amax(-1).tolist())
        return every


@pytest.fixture(scope="module")
def kept() -> Iterator[Kept]:
    with kept_processes(3) as made:
        yield made


@pytest.fixture
def train(kept: Kept, task: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Seen]:
    """``train(name, steps, groups, *words)``: GRPO on so many groups a step, one mini-batch."""
    monkeypatch.chdir(task)
    monkeypatch.syspath_prepend(task)
    (task / "scorer.py").write_text(LETTERS)
    (task / "slow.py").write_text(SLOW)
    (task / "late.py").write_text(LATE)

    def run(name: str, steps: int, groups: int, *words: str) -> Seen:
        seen = Seen(task / f"schedules_{name}")

        class Runner(TaskRunner):
            def make_trainer(self, *arguments: Any) -> Any:
                trainer = super().make_trainer(*arguments)
                trainer.callbacks.append(seen)
                return trainer

        sizes = (f"data.train_batch_size={groups}", f"actor_rollout_ref.actor.ppo_mini_batch_size={groups}")
        mine = (f"trainer.total_training_steps={steps}", f"trainer.default_local_dir=schedules_{name}")
        config: Any = load_config("ppo_trainer", [*SETTINGS, *sizes, *mine, *words])
        run_ppo(config, Runner)
        return seen

    return run


@pytest.mark.parametrize(
    "schedule",
    [(f"{MODE}=colocate_async",), (f"{MODE}=separate_async", "trainer.v1.separate_async.parameter_sync_step=1")],
    ids=["colocate", "separate"],
)
def test_the_samples_and_weights_are_those_of_one_process(
    schedule: tuple[str, ...], train: Callable[..., Seen], request: pytest.FixtureRequest
):
    name, mode = request.node.callspec.id, (*schedule, f"{R}.full_determinism=true")
    beside = train(f"{name}_beside", 3, 2, *mode, *OWN_POOL, "trainer.save_freq=3")
    in_turn = train(f"{name}_in_turn", 3, 2, *mode, "trainer.runtime=local", "trainer.save_freq=3")
    assert beside.prompts() == in_turn.prompts() == [[0, 1], [2, 3], [4, 5]]
    assert beside.staleness() == in_turn.staleness() == [[0, 0], [1, 1], [1, 1]]
    for ours, theirs in zip(beside.batches, in_turn.batches, strict=True):
        for column in ("responses", "token_versions", "rollout_log_probs", "advantages"):
            assert torch.equal(ours.tensors[column], theirs.tensors[column]), column
    ours, theirs = (model_of(run, 3).state_dict() for run in (beside, in_turn))
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def model_of(run: Seen, version: int) -> Any:
    """What a run sampled with as this version."""
    step = run.folder / f"global_step_{version}" / "actor" / "huggingface"
    return AutoModelForCausalLM.from_pretrained(step if version else run.folder.parent / "model")


def log_probs_of(model: Any, tokens: torch.Tensor, responses: int) -> torch.Tensor:
    """(responses,) of the last tokens of a sequence, each given those before it."""
    with torch.no_grad():
        logits = model(tokens[None]).logits[0, -responses - 1 : -1].float()
    return logits.log_softmax(-1).gather(-1, tokens[-responses:, None])[:, 0]


@pytest.mark.parametrize("at_update", ["pause", "abort"])
def test_a_response_in_flight_goes_on_with_new_weights_each_token_by_the_model_of_its_version(
    at_update: str, train: Callable[..., Seen]
):
    """Groups for step 3 begin with step 2, which is over before the 24 slow passes of an answer are."""
    slow = ("actor_rollout_ref.model.external_lib=slow", "data.max_response_length=24", f"{R}.ignore_eos=true")
    run = train(
        at_update, 3, 2, *STREAM, *OWN_POOL, *slow, f"{R}.requests_at_update={at_update}", "trainer.save_freq=1"
    )
    assert run.prompts() == [[0, 1], [2, 3], [4, 5]] and max(map(max, run.staleness())) == 1
    models, mixed = {version: model_of(run, version) for version in range(3)}, 0
    for batch in run.batches:
        columns = batch.tensors
        assert torch.equal(columns["old_log_probs"], columns["rollout_log_probs"]), "what the ratio is to"
        for row in range(len(batch)):
            versions, drawn = columns["token_versions"][row], columns["rollout_log_probs"][row]
            assert len(versions) == 24 and versions.tolist() == sorted(versions.tolist())
            tokens = columns["input_ids"][row][columns["attention_mask"][row].bool()]
            for version in set(versions.tolist()):
                expected = log_probs_of(models[version], tokens, 24)
                assert (expected - drawn)[versions == version].abs().max() < 1e-4
            mixed += len(set(versions.tolist())) > 1
    assert mixed >= 2, "a group of the last step"


def test_a_late_group_is_overtaken_in_order_of_completion_and_trained_on_within_its_bound(train: Callable[..., Seen]):
    rules = ("trainer.v1.sampler.order=completion", "trainer.v1.sampler.max_off_policy_strategy=wait")
    run = train("late", 3, 2, *STREAM, *OWN_POOL, *rules, f"{R}.agent.default_agent_loop=late:LateLoop")
    first, second, third = run.prompts()
    assert 0 in second and set(first) < {1, 2, 3} and sorted([*first, *second, *third]) == [0, 1, 2, 3, 4, 5]
    assert run.staleness()[1][second.index(0)] == 1 and max(map(max, run.staleness())) == 1


def test_sglang_samples_beside_training_and_its_worker_passes_the_weights_on(train: Callable[..., Seen], log: Path):  # noqa: F811
    run = train("sglang", 2, 2, *STREAM, *OWN_POOL, f"{R}.name=sglang")
    assert run.prompts() == [[0, 1], [2, 3]] and run.staleness() == [[0, 0], [1, 1]]
    began, *noted = noted_in(log)
    assert began["tp"] == 1 and not any("began" in one for one in noted)
    assert_each_version_came_once(noted)
