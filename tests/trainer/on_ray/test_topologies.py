"""Wherever samplers sit, a run samples the same tokens; weights reach every replica once per version."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.trainer.on_ray.conftest import Run
from tests.trainer.on_ray.test_same_numbers import agree
from verl.rollout.server.client import HttpClient
from verl.rollout.server.host import LISTENING
from verl.rollout.server.own import INFO
from verl.rollout.server.process import KEY

pytestmark = pytest.mark.dist
R, SECRET = "actor_rollout_ref.rollout", "a key that both sides know"


def outputs(run: Run, steps: int) -> list[list[str]]:
    return [[sample["output"] for sample in step] for step in run.samples[:steps]]


@pytest.fixture(scope="module")
def servers(task: Path) -> Iterator[list[str]]:
    """Addresses of two servers with the run's first model."""
    command = [sys.executable, "-m", "verl.rollout.server.host", f"actor_rollout_ref.model.path={task / 'model'}"]
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


def test_samplers_in_a_pool_of_their_own_sample_and_learn_as_one_process_does(train: Callable[..., Run], alone: Run):
    own = ["actor_rollout_ref.hybrid_engine=false", f"{R}.nnodes=1", f"{R}.n_gpus_per_node=2"]
    apart = train("apart", 2, "trainer.n_gpus_per_node=2", *own, f"{R}.checkpoint_engine.backend=shared_memory")
    assert outputs(apart, 2) == outputs(alone, 2)
    agree(apart, alone, steps=slice(0, 2))


def test_a_server_is_loaded_once_per_version_by_four_ranks_and_samples_the_same(
    train: Callable[..., Run], alone: Run, servers: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(KEY, SECRET)
    urls = f"{R}.server.url=[{','.join(servers)}]"
    run = train("served", 2, "trainer.nnodes=2", "trainer.n_gpus_per_node=2",
                f"{R}.name=server", urls, f"{R}.server.api_key_env={KEY}")  # fmt: skip
    assert [loads(url) for url in servers] == [3, 3], "the first weights, and those of two steps"
    assert outputs(run, 2) == outputs(alone, 2)
    agree(run, alone, steps=slice(0, 2))
