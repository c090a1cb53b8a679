"""Wherever samplers sit, a run learns, samples the same tokens, and weights reach every replica once per version."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean

import pytest

from tests.harness.scorers import scorer
from tests.trainer.on_ray.conftest import Run
from tests.trainer.on_ray.test_megatron import MEGATRON
from verl.rollout.server.client import HttpClient
from verl.rollout.server.host import LISTENING
from verl.rollout.server.own import INFO
from verl.rollout.server.process import KEY

pytestmark = pytest.mark.slow
R, SECRET = "actor_rollout_ref.rollout", "a key that both sides know"
EVEN = scorer("sum(ord(character) % 2 == 0 for character in solution_str) / 6")
STEPS = 5
LEARN = (
    "algorithm.adv_estimator=grpo",
    "algorithm.use_kl_in_reward=false",
    "data.train_batch_size=8",
    "reward.custom_reward_function.path=even.py",
    f"{R}.n=8",
    f"{R}.full_determinism=true",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.actor.ppo_epochs=1",
    "actor_rollout_ref.actor.shuffle=false",
    "actor_rollout_ref.actor.optim.lr=4e-2",
    "actor_rollout_ref.actor.optim.lr_warmup_steps=0",
)
"""A quarter of what the first model writes are even characters; five steps make it three quarters and more."""


@pytest.fixture(scope="module")
def servers(task: Path) -> Iterator[list[str]]:
    """Addresses of two servers with the runs' first model."""
    model = [f"actor_rollout_ref.model.path={task / 'model'}", f"{R}.full_determinism=true"]
    command = [sys.executable, "-m", "verl.rollout.server.host", *model]
    environment = {**os.environ, KEY: SECRET}
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(2)]
    try:
        yield [process.stdout.readline().removeprefix(LISTENING).strip() for process in started if process.stdout]
    finally:
        for process in started:
            process.kill()
            process.wait(10)


def loads(url: str) -> int:
    """How often a server was given new weights."""

    async def ask() -> int:
        answer = await HttpClient(url, key=SECRET).ask("GET", INFO, None, 60)
        return int(answer.json()["stats"]["weight_updates"])

    return asyncio.run(ask())


@pytest.fixture(scope="module")
def learn(train: Callable[..., Run], task: Path) -> Callable[..., Run]:
    """``learn(name, *place)``: the same GRPO run with its samplers in some place."""
    (task / "even.py").write_text(EVEN)
    return lambda name, *place: train(name, STEPS, *LEARN, *place)


@pytest.fixture(scope="module")
def in_place(learn: Callable[..., Run]) -> Run:
    """One process that trains and samples."""
    return learn("in_place", "trainer.runtime=local")


@pytest.fixture(scope="module")
def colocated(learn: Callable[..., Run]) -> Run:
    """Two trainer ranks, a sampler beside each."""
    return learn("colocated", "trainer.n_gpus_per_node=2")


@pytest.fixture(scope="module")
def apart(learn: Callable[..., Run]) -> Run:
    """Two trainer ranks, and two samplers in a pool of their own."""
    own = ["actor_rollout_ref.hybrid_engine=false", f"{R}.nnodes=1", f"{R}.n_gpus_per_node=2"]
    return learn("apart", "trainer.n_gpus_per_node=2", *own, f"{R}.checkpoint_engine.backend=shared_memory")


@pytest.fixture(scope="module")
def served(learn: Callable[..., Run], servers: list[str]) -> Run:
    """Four trainer ranks on two nodes, and two HTTP servers that sample."""
    urls = f"{R}.server.url=[{','.join(servers)}]"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KEY, SECRET)
        return learn("served", "trainer.nnodes=2", "trainer.n_gpus_per_node=2",
                     f"{R}.name=server", urls, f"{R}.server.api_key_env={KEY}")  # fmt: skip


@pytest.fixture(scope="module")
def megatron(learn: Callable[..., Run]) -> Run:
    """Two trainer ranks in tensor parallel on Megatron-Core, with the samplers in their processes."""
    return learn("on_megatron", *MEGATRON)


@pytest.mark.parametrize("place", ["in_place", "colocated", "apart", "served", "megatron"])
def test_rewards_rise(request: pytest.FixtureRequest, place: str):
    rewards = [step["critic/rewards/mean"] for step in request.getfixturevalue(place).steps]
    assert len(rewards) == STEPS and mean(rewards[-2:]) > rewards[0] + 0.3, rewards


@pytest.mark.parametrize("place", ["colocated", "apart", "served"])
def test_samples_and_gradients_are_those_of_one_process(request: pytest.FixtureRequest, in_place: Run, place: str):
    """From equal weights the first step's tokens are the same bit for bit; then ranks round their sums differently."""
    run = request.getfixturevalue(place)
    for step in range(2):
        tokens = [[sample["output"] for sample in one.samples[step]] for one in (run, in_place)]
        assert len(tokens[0]) == 64 and tokens[0] == tokens[1], f"step {step + 1}"
    for mine, other in zip(run.steps[:2], in_place.steps[:2]):
        for name in ("actor/loss", "actor/grad_norm"):
            assert mine[name] == pytest.approx(other[name], rel=1e-5, abs=1e-5), name


@pytest.mark.usefixtures("served")
def test_a_server_is_loaded_once_per_version_by_four_ranks(servers: list[str]):
    assert [loads(url) for url in servers] == [STEPS + 1] * 2, "the first weights, and those of each step"


# ---- one step off: the next batch is sampled while this one is trained on ------------------------------------------

ONE_OFF = ("trainer.v1.trainer_mode=one_step_off", "algorithm.rollout_correction.bypass_mode=true")
ONE_BY_ONE = ("actor_rollout_ref.hybrid_engine=false", f"{R}.nnodes=1", f"{R}.n_gpus_per_node=1")


@pytest.fixture(scope="module")
def in_turn(learn: Callable[..., Run]) -> Run:
    """One process, in which sampling and training take turns."""
    return learn("in_turn", "trainer.runtime=local", *ONE_OFF)


def test_sampling_beside_training_gives_the_tokens_and_numbers_of_taking_turns(learn: Callable[..., Run], in_turn: Run):
    at_once = learn("at_once", *ONE_BY_ONE, *ONE_OFF, f"{R}.checkpoint_engine.backend=shared_memory")
    for mine, other in zip(at_once.samples, in_turn.samples, strict=True):
        assert [one["output"] for one in mine] == [one["output"] for one in other] and len(mine) == 64
    for mine, other in zip(at_once.steps, in_turn.steps, strict=True):
        for name in ("actor/loss", "actor/grad_norm", "actor/ppo_kl", "critic/rewards/mean"):
            assert mine[name] == pytest.approx(other[name], rel=1e-5, abs=1e-5), name
    assert [step["training/off_policy/trajectory_staleness_worst/max"] for step in at_once.steps] == [0, 1, 1, 1, 1]
    assert all("timing_s/wait_for_samples" in step for step in at_once.steps[:-1])


def test_a_reward_function_that_fails_in_the_sampling_thread_ends_the_run_with_its_own_error(
    learn: Callable[..., Run], task: Path, capsys: pytest.CaptureFixture[str]
):
    """It fails on the samples for step 2, while step 1 is trained on."""
    (task / "fails.py").write_text(
        "CALLS = []\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    CALLS.append(1)\n"
        "    if len(CALLS) > 64: raise KeyError('the answer of row 65')\n    return len(CALLS) % 2\n"
    )
    fails = ("reward.custom_reward_function.path=fails.py", "reward.on_error=raise")
    with pytest.raises((AssertionError, KeyError)):
        learn("fails", *ONE_BY_ONE, *ONE_OFF, *fails, f"{R}.checkpoint_engine.backend=shared_memory")
    said = capsys.readouterr().err
    assert "the answer of row 65" in said and "fails.py" in said
    assert not [thread for thread in threading.enumerate() if thread.name == "verl-ahead"]
