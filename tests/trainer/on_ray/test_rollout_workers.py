"""Samplers on two nodes and agent loops in processes of their own: the run is that of one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.trainer.on_ray.conftest import Run
from tests.trainer.on_ray.test_same_numbers import agree

pytestmark = pytest.mark.slow
R = "actor_rollout_ref.rollout"


def outputs(run: Run, steps: int) -> list[list[str]]:
    return [[sample["output"] for sample in step] for step in run.samples[:steps]]


def test_samplers_on_two_nodes_and_agent_loops_in_three_processes_sample_and_score_as_one_process_does(
    train: Callable[..., Run], alone: Run, monkeypatch: pytest.MonkeyPatch
):
    from verl.single_controller.ray import RayWorkerGroup

    started, start = [], RayWorkerGroup.start_helpers
    monkeypatch.setattr(RayWorkerGroup, "start_helpers", lambda *args: started.extend(start(*args)) or started)
    own = ["actor_rollout_ref.hybrid_engine=false", f"{R}.nnodes=2", f"{R}.n_gpus_per_node=1"]
    loops = [f"{R}.agent.num_workers=3", "reward.while_sampling=true"]
    sizes = ["trainer.nnodes=2", "trainer.n_gpus_per_node=1"]
    run = train("two_pools", 2, *sizes, *own, *loops, f"{R}.checkpoint_engine.backend=gloo")
    assert [handle.name for handle in started] == ["agent_loop[0]", "agent_loop[1]", "agent_loop[2]"]
    assert outputs(run, 2) == outputs(alone, 2)
    agree(run, alone, steps=slice(0, 2))
    answered = [run.steps[0][f"rollout/replicas/requests/{name}"] for name in ("min", "max")]
    assert sum(answered) == len(run.samples[0]) and min(answered) > 0 and run.steps[0]["rollout/replicas/alive"] == 2
