"""A curriculum that learns from steps while a queue samples ahead of them, and continues in a resumed run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.rows import addition_rows
from tests.harness.runs import Seen, differing, numbers, prepare, train
from tests.harness.scorers import scorer

STEPS, STOP = 4, 2
RUN = (
    "trainer.v1.trainer_mode=fully_async",
    "async_training.staleness_threshold=1",
    "async_training.trigger_parameter_sync_step=1",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.actor.optim.lr=1e-2",
    "algorithm.filter_groups.enable=true",
    "data.sampler.class_path=pkg://verl.data.curriculum",
    "data.sampler.class_name=MixedRewardsFirst",
    "trainer.save_freq=1",
    f"trainer.total_training_steps={STEPS}",
)


def run(folder: str, *changes: str) -> Seen:
    return train(*RUN, f"trainer.default_local_dir={folder}", *changes)


def chances(seen: Seen) -> list[float]:
    return [seen.trainer.source.loader.sampler.chance(row) for row in range(8)]


@pytest.fixture
def here(workplace):
    """Every second prompt gets one reward for all answers."""
    prepare(scorer("sum(map(ord, solution_str)) % 97 if extra_info['index'] % 2 else 1.0"), addition_rows(8))
    return workplace


def test_a_curriculum_under_a_queue_continues_bitwise_in_a_resumed_run(here):
    straight = run("straight")
    place = Path(f"straight/global_step_{STOP}")
    assert (place / "queue").is_dir(), "groups of later steps wait in the checkpoint"
    rest = run("resumed", "trainer.resume_mode=resume_path", f"trainer.resume_from_path={place}")
    assert [numbers(step) for step in rest.metrics] == [numbers(step) for step in straight.metrics[STOP:]]
    rows = [[int(row) for row in batch.non_tensor_batch["__row__"]] for batch in straight.batches]
    assert all(row % 2 for step in rows for row in step), "equal rewards are dropped"
    assert [[int(row) for row in batch.non_tensor_batch["__row__"]] for batch in rest.batches] == rows[STOP:]
    assert chances(rest) == chances(straight) and min(chances(straight)[::2]) < 1 == min(chances(straight)[1::2])
    assert differing(f"straight/global_step_{STEPS}/actor", f"resumed/global_step_{STEPS}/actor") == []
