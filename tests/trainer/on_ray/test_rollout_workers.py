"""Agent loops in processes of their own: the samples, scores and losses of a run are those of one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.trainer.on_ray.conftest import Run
from tests.trainer.on_ray.test_same_numbers import agree
from tests.trainer.on_ray.test_topologies import outputs

pytestmark = pytest.mark.dist
R = "actor_rollout_ref.rollout"


def test_three_processes_run_the_loops_of_two_replicas_and_every_sample_stays_in_its_row(
    train: Callable[..., Run], alone: Run, monkeypatch: pytest.MonkeyPatch
):
    from verl.single_controller.ray import RayWorkerGroup

    started = []
    start = RayWorkerGroup.start_beside
    monkeypatch.setattr(RayWorkerGroup, "start_beside", lambda *args: started.extend(start(*args)) or started)
    run = train("loops", 2, "trainer.n_gpus_per_node=2", f"{R}.agent.num_workers=3", "reward.while_sampling=true")
    assert [handle.name for handle in started] == ["agent_loop[0]", "agent_loop[1]", "agent_loop[2]"]
    assert outputs(run, 2) == outputs(alone, 2)
    agree(run, alone, steps=slice(0, 2))
