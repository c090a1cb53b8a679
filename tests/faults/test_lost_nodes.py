"""Three Ray nodes on one machine: one is lost in a run, which starts again by itself on those that are there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.faults.server import RESTART_SECONDS
from tests.harness.forked_runs import (
    STEPS,
    Ended,
    Run,
    Server,
    assert_same_end,
    finish,
    grpo,
    metrics,
    prepare,
    samples,
    weights,
)

pytestmark = pytest.mark.slow

NODE = {"num_cpus": 1, "object_store_memory": 120 << 20, "include_dashboard": False}
SECOND_SAVE = "published:2:PAUSE"
"""Of each attempt: there the controller waits."""


@pytest.fixture
def cluster(own_ray_folder: str) -> Iterator:
    from ray.cluster_utils import Cluster

    from verl.single_controller.ray import security

    security.demand_token()
    started = Cluster(initialize_head=True, head_node_args=NODE)
    try:
        for _ in range(2):
            started.add_node(**NODE)
        Path(own_ray_folder, "ray", "ray_current_cluster").unlink(missing_ok=True)
        yield started
    finally:
        started.shutdown()


@pytest.fixture
def nodes_server(cluster, request) -> Iterator[Server]:
    """Of runs that have the cluster's token; a parameter is their variables."""
    started = Server(**getattr(request, "param", {}))
    yield started
    started.close()


def on(cluster, *more: str) -> list[str]:
    return [
        *grpo(),
        "data.train_batch_size=6",
        "actor_rollout_ref.actor.ppo_mini_batch_size=6",
        "actor_rollout_ref.rollout.full_determinism=true",
        "trainer.nnodes=3",
        "trainer.n_gpus_per_node=1",
        "trainer.max_restarts=3",
        f"ray_kwargs.ray_init.address={cluster.address}",
        *more,
    ]


def lose_a_node(cluster) -> None:
    """The machine of a worker is gone, and the worker with it: the driver is on the head."""
    cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)


def start_and_lose_a_node(cluster, server: Server, folder: Path) -> tuple[Path, Run]:
    """The folder of an undisturbed run, and the same run in another folder, which has just lost a node."""
    undisturbed, hit = prepare(folder / "undisturbed"), prepare(folder / "hit")
    finish(server, undisturbed, on(cluster))
    run = server.start(hit, on(cluster), SECOND_SAVE)
    run.until_paused()
    lose_a_node(cluster)
    unpause(run)
    return undisturbed, run


def unpause(run: Run) -> None:
    run.until_paused()
    (run.folder / "paused").unlink()


def ended_without_pause(run: Run) -> Ended:
    """How it ends, whichever attempts reach their second save."""
    while not run.ends_within(0.1):
        (run.folder / "paused").unlink(missing_ok=True)
    return run.wait()


def test_a_run_waits_for_the_machine_that_replaces_a_lost_one(cluster, nodes_server: Server, tmp_path):
    undisturbed, run = start_and_lose_a_node(cluster, nodes_server, tmp_path)
    run.until_said("the run waits up to 600 s for 3 machines")
    cluster.add_node(**NODE)
    ended = ended_without_pause(run)
    assert ended.status == 0, ended.output[-3000:]
    assert "trainer.max_restarts=3: 2 attempts" in ended.output
    assert_same_end(undisturbed, run.folder)


@pytest.mark.parametrize("nodes_server", [{RESTART_SECONDS: "5"}], indirect=True, ids=["5 s"])
def test_a_run_continues_on_fewer_machines_with_equal_samples(cluster, nodes_server: Server, tmp_path):
    undisturbed, run = start_and_lose_a_node(cluster, nodes_server, tmp_path)
    run.until_said("the run continues on 2 of 3 machines")
    run.until_paused()
    lose_a_node(cluster)
    cluster.add_node(**NODE)
    ended = ended_without_pause(run)
    assert ended.status == 0, ended.output[-3000:]
    assert "trainer.max_restarts=3: 3 attempts" in ended.output
    assert samples(undisturbed) == samples(run.folder)
    scores = [[row["critic/score/mean"] for row in metrics(folder)] for folder in (undisturbed, run.folder)]
    assert scores[0] == scores[1] and len(scores[0]) == STEPS
    last = f"run/global_step_{STEPS}/actor/huggingface"
    one, other = (
        {name: tensor for (_, name), tensor in weights(folder / last).items()} for folder in (undisturbed, run.folder)
    )
    assert max(float((one[key] - other[key]).abs().max()) for key in one) < 1e-4
    assert all(torch.isfinite(tensor).all() for tensor in other.values())
