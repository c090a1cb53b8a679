"""A run gives the same numbers in this process, on Ray, on several ranks and nodes, and however roles are placed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from scripts.count_frames import LOCAL_FRAMES, RAY_FRAMES, SETTING, counted
from tests.harness.runs import numbers
from tests.trainer.on_ray.conftest import Run
from verl.metrics import notices, reset_notices

pytestmark = pytest.mark.slow
CLOCKS = ("timing", "perf/", "global_seqlen/", "rollout_data/")
STEP = ("actor/loss", "actor/grad_norm", "critic/loss", "critic/grad_norm")


def agree(run: Run, reference: Run, tolerance: float = 1e-5, steps: slice = slice(None)) -> None:
    for mine, other in zip(run.steps[steps], reference.steps[steps], strict=True):
        for name in STEP:
            assert mine[name] == pytest.approx(other[name], rel=tolerance, abs=tolerance), name


def test_ray_with_one_worker_gives_the_bits_of_this_process(train: Callable[..., Run], alone: Run):
    with counted() as frames:
        ray = train("one", 4, "trainer.runtime=ray", "trainer.save_freq=4", SETTING)
    assert [numbers(step, CLOCKS) for step in ray.steps] == [numbers(step, CLOCKS) for step in alone.steps]
    assert ray.samples == alone.samples and len(ray.samples) == 4
    ours, theirs = ray.weights(4), alone.weights(4)
    assert ours.keys() == theirs.keys() and len(ours) > 50
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert 0 < len(frames) <= RAY_FRAMES, frames
    assert 0 < len(alone.frames) <= LOCAL_FRAMES, alone.frames
    assert frames[-1] == alone.frames[-1] == "verl.engines.step.clip_and_step"


@pytest.fixture(scope="module")
def two(train: Callable[..., Run]) -> Run:
    """Two steps on two workers, the second of which records what it computes in the second."""
    profiled = ["enable=true", "ranks=[1]", "tool_config.torch.discrete=true"]
    told = ["global_profiler.tool=torch", "global_profiler.steps=[2]", "global_profiler.save_path=two/profile"]
    switches = [f"actor_rollout_ref.actor.profiler.{name}" for name in profiled]
    return train("two", 2, "trainer.n_gpus_per_node=2", "trainer.copy_check_freq=2", *told, *switches)


def test_two_workers_give_the_samples_the_losses_and_the_gradients_of_one(two: Run, alone: Run):
    assert [[s["output"] for s in step] for step in two.samples] == [
        [s["output"] for s in step] for step in alone.samples[:2]
    ]
    agree(two, alone, steps=slice(0, 2))


def test_what_two_workers_hold_alike_is_compared_as_often_as_asked_for(two: Run):
    assert ["timing_s/compare_copies" in step for step in two.steps] == [False, True]


def test_a_worker_of_two_records_the_step_it_is_asked_to(two: Run):
    found = sorted(path.name for path in (two.folder / "profile" / "step_2").iterdir())
    assert found[0] == "actor_infer_0_rank1.json.gz" and len(found) > 1
    assert all(name.startswith("actor_train_") and name.endswith("_rank1.json.gz") for name in found[1:])


def test_samplers_in_actors_of_their_own_and_weights_in_the_background_change_no_number(
    train: Callable[..., Run], two: Run
):
    hosted = "actor_rollout_ref.rollout.checkpoint_engine.backend=shared_memory"
    beside = train("beside", 2, "trainer.n_gpus_per_node=2", hosted, "trainer.async_weight_update=true")
    assert [numbers(step, CLOCKS) for step in beside.steps] == [numbers(step, CLOCKS) for step in two.steps]
    assert beside.samples == two.samples


def test_four_workers_on_two_nodes_do_so_too_and_say_where_they_are(train: Callable[..., Run], alone: Run):
    reset_notices()
    four = train("four", 2, "trainer.n_gpus_per_node=2", "trainer.nnodes=2")
    agree(four, alone, steps=slice(0, 2))
    said = notices()["trainer.nnodes"]
    nodes = [line.split("node ")[1].split()[0] for line in said.splitlines() if ": node " in line]
    assert len(nodes) == 4 and len(set(nodes)) == 2 and nodes == sorted(nodes, key=nodes.index)


def test_mini_batches_that_do_not_divide_by_the_workers_give_the_same_numbers(train: Callable[..., Run], alone: Run):
    reset_notices()
    three = train("three", 2, "trainer.n_gpus_per_node=3")
    assert [[s["output"] for s in step] for step in three.samples] == [
        [s["output"] for s in step] for step in alone.samples[:2]
    ]
    agree(three, alone, steps=slice(0, 2))
    said = notices()["actor_rollout_ref.actor.ppo_mini_batch_size"]
    assert "4 samples do not divide by 3 processes: the shortest is computed 2 more time(s)" in said


def test_roles_in_pools_of_their_own_give_the_bits_of_a_shared_pool(train: Callable[..., Run], alone: Run):
    pools = "trainer.resource_pools={critics:{roles:[critic],processes:[1]},references:{roles:[ref],processes:[1]}}"
    split = train("split", 4, "trainer.save_freq=4", pools)
    assert [numbers(step, CLOCKS) for step in split.steps] == [numbers(step, CLOCKS) for step in alone.steps]
    ours, theirs = split.weights(4), alone.weights(4)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_a_run_saved_on_two_ranks_goes_on_with_one_and_with_four(train: Callable[..., Run], alone: Run):
    """The same prompts, the same samples, the same losses to 1e-5."""
    train("saved", 2, "trainer.n_gpus_per_node=2", "trainer.save_freq=2")
    source = "trainer.resume_from_path=saved/global_step_2"
    for name, ranks in (("then_one", []), ("then_four", ["trainer.n_gpus_per_node=2", "trainer.nnodes=2"])):
        resumed = train(name, 3, "trainer.resume_mode=resume_path", source, *ranks)
        assert [step["training/global_step"] for step in resumed.steps] == [3]
        for what in ("input", "output"):
            assert [s[what] for s in resumed.samples[0]] == [s[what] for s in alone.samples[2]], (name, what)
        (mine,), other = resumed.steps, alone.steps[2]
        for metric in (*STEP, "actor/pg_loss", "actor/ppo_kl", "critic/score/mean"):
            assert mine[metric] == pytest.approx(other[metric], rel=1e-5, abs=1e-5), (name, metric)
