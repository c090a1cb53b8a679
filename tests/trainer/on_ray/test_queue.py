"""Sampling beside training on Ray: group by group, in a pool of its own, with the numbers of one process."""

from __future__ import annotations

import pytest
import torch

from verl.observability.gantt import busy_seconds, by_role
from verl.observability.spans import read_spans

pytestmark = pytest.mark.dist

STREAM = (
    "trainer.v1.trainer_mode=fully_async",
    "async_training.staleness_threshold=0.5",
    "async_training.trigger_parameter_sync_step=2",
    "trainer.save_freq=3",
    "actor_rollout_ref.rollout.full_determinism=true",
)
OWN_POOL = (
    "trainer.runtime=ray",
    "actor_rollout_ref.hybrid_engine=false",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=2",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=shared_memory",
)


@pytest.fixture(scope="module")
def in_turn(train):
    return train("stream_in_turn", 3, *STREAM, "trainer.runtime=local")


def test_groups_that_are_sampled_beside_training_have_the_numbers_of_one_process(train, in_turn):
    """Updates wait for the groups that were admitted, so which version draws what is a matter of counts."""
    beside = train("stream_beside", 3, *STREAM, *OWN_POOL, "trainer.trace=true")
    shown = ("input", "output", "score")
    ours, theirs = ([[tuple(row[name] for name in shown) for row in step] for step in run.samples]
                    for run in (beside, in_turn))  # fmt: skip
    assert ours == theirs and len(ours) == 3
    ours, theirs = beside.weights(3), in_turn.weights(3)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    for name in ("fully_async/staleness/mean", "count/staleness_samples", "actor/grad_norm"):
        assert [step[name] for step in beside.steps] == [step[name] for step in in_turn.steps], name
    assert all(step["fully_async/rollouter/idle_seconds"] > 0 for step in beside.steps)
    drawn = by_role(read_spans(beside.folder))
    groups = {f"group {number}" for number in range(12)}
    assert {one.thread for one in drawn["sampling"]} == {one.thread for one in drawn["scoring"]} == groups
    assert all(busy_seconds(drawn[role]) > 0 for role in ("sampling", "scoring", "training"))
