"""The trainer's device samples while the trainer waits: the numbers of a run in which it does not."""

from __future__ import annotations

import pytest
import torch

from tests.harness.runs import records
from verl.observability.gantt import busy_seconds, by_role
from verl.observability.spans import read_spans
from verl.trainer.ppo.lending import LendingRule

pytestmark = pytest.mark.slow

SWITCH = "trainer.v1.separate_async.hybrid_rollout"
SETTINGS = (
    "trainer.v1.trainer_mode=separate_async",
    "trainer.v1.separate_async.num_warmup_batches=1",
    "trainer.v1.separate_async.parameter_sync_step=2",
    f"{SWITCH}.enable_switch=true",
    "algorithm.rollout_correction.bypass_mode=true",
    "actor_rollout_ref.rollout.full_determinism=true",
    "actor_rollout_ref.rollout.ignore_eos=true",
    "actor_rollout_ref.rollout.free_cache_engine=true",
    "actor_rollout_ref.rollout.max_num_seqs=1",
    "data.max_response_length=64",
    "trainer.save_freq=3",
)
OWN_POOL = (
    "trainer.runtime=ray",
    "actor_rollout_ref.hybrid_engine=false",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=1",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=shared_memory",
)


def test_a_trainer_that_lends_its_device_trains_on_the_samples_of_one_that_has_none_to_lend(train, monkeypatch):
    """Lent devices have the version of the samplers, also once the trainer has gone on, as in the waits after its first
    mini-batch and before an update; what they give back goes on from its prefix."""
    for name in ("cost", "cost_again"):  # so that every wait is worth it in which requests have no slot
        monkeypatch.setattr(LendingRule, name, -1.0)
    lent = train("lent", 3, *SETTINGS, *OWN_POOL, "trainer.trace=true")
    alone = train("lent_alone", 3, *SETTINGS, "trainer.runtime=local", "trainer.replay_from=lent")
    shown = ("input", "output", "score")
    ours, theirs = ([[tuple(row[name] for name in shown) for row in step] for step in run.samples]
                    for run in (lent, alone))  # fmt: skip
    assert ours == theirs and [len(step) for step in ours] == [8, 8, 8]
    ours, theirs = lent.weights(3), alone.weights(3)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert lent.steps[0]["separate_async/decision/lend"] == 1
    tokens = sum(step["separate_async/switch/lent_tokens"] for step in lent.steps)
    assert 0 < tokens < 3 * 8 * 64
    times = [step["separate_async/switch/times"] for step in lent.steps]
    begun = [step["separate_async/decision/lend"] for step in lent.steps]
    assert sum(times) > sum(begun), (times, begun)
    moved = sum(step["separate_async/switch/moved_requests"] for step in lent.steps)
    assert moved == (lent.folder / "ledger.jsonl").read_text().count('"moved"')
    assert all(step["training/off_policy/trajectory_staleness_worst/max"] <= 1 for step in lent.steps)
    decisions = records(lent.folder / "schedule.jsonl")
    drew = {span[0] for one in decisions if one["event"] == "ended" for group in one["groups"]
            for request in group["requests"].values() for span in request["spans"]}  # fmt: skip
    assert drew == {"replica of rollout[0]", "replica of actor[0]"}
    spans = by_role(read_spans(lent.folder))
    (training, lending) = (spans[role] for role in ("training", "lending"))
    sampled = [one for one in lending if one.stage == "lent"]
    assert busy_seconds(sampled) > 0
    assert all(one.end <= work.begin or one.begin >= work.end for one in sampled for work in training)
