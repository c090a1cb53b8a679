"""The stages of a step on hand-made batches, without a model."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from verl.config import PPOTrainerConfig, replace
from verl.errors import DataError
from verl.metrics import MetricSet
from verl.protocol import DataProto
from verl.trainer.ppo import stages
from verl.trainer.ppo.context import SamplePool, StepContext
from verl.trainer.ppo.roles import RoleHandle


def config(**changes) -> PPOTrainerConfig:
    base = {"algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollout.n": 2, "data.train_batch_size": 2}
    return replace(PPOTrainerConfig(), **{**base, **changes})


def context(reward=None, **changes) -> StepContext:
    return StepContext(config(**changes), reward or (lambda batch: {}), total_steps=10)


def batch(rewards: list[float], uids: list[str], lengths: list[int] | None = None) -> DataProto:
    """Rows with their reward on the last response token; prompts of one token, four response tokens wide."""
    lengths = lengths or [3] * len(rewards)
    mask = torch.tensor([[1] * n + [0] * (4 - n) for n in lengths])
    scores = torch.zeros(len(rewards), 4)
    for row, (reward, n) in enumerate(zip(rewards, lengths)):
        scores[row, n - 1] = reward
    attention = torch.cat([torch.ones(len(rewards), 1, dtype=torch.long), mask], dim=1)
    tensors = {"response_mask": mask, "token_level_scores": scores, "attention_mask": attention}
    return DataProto.from_dict(tensors=tensors, non_tensors={"uid": np.array(uids, dtype=object)})


def test_advantages_of_two_groups_are_those_of_grpo():
    data = batch([1.0, 0.0, 0.0, 1.0], ["a", "a", "b", "b"])
    stages.add_advantages(data, context())
    # group mean 0.5, sample std 0.70710678: (1 - 0.5) / (0.70710678 + 1e-6) = 0.7071058
    expected = torch.tensor([0.7071058, -0.7071058, -0.7071058, 0.7071058])
    torch.testing.assert_close(data.batch["advantages"][:, 0], expected, atol=1e-6, rtol=0)
    assert data.batch["advantages"][:, 3].abs().sum() == 0, "padding has no advantage"


def test_an_unscorable_sample_gets_no_advantage_and_is_in_no_baseline():
    data = batch([1.0, 0.0, 0.25], ["a", "a", "a"])
    data.non_tensor_batch["unscorable"] = np.array([False, True, False])
    stages.add_advantages(data, context())
    # only 1.0 and 0.25 count: mean 0.625, sample std 0.53033; with the failed sample the mean would be 0.4167
    torch.testing.assert_close(
        data.batch["advantages"][:, 0], torch.tensor([0.7071054, 0.0, -0.7071054]), atol=1e-5, rtol=0
    )


def test_a_scorer_that_fails_on_a_row_masks_that_row():
    data = batch([0.0, 0.0], ["a", "a"])
    reward = {
        "reward_tensor": torch.zeros(2, 4),
        "unscorable": [True, False],
        "reward_extra_info": {"acc": [None, 1.0]},
    }
    ctx = context(reward=lambda _: reward)
    scored = stages.score(data, None, ctx)
    assert scored.batch["response_mask"].sum(-1).tolist() == [0, 3]
    assert scored.non_tensor_batch["acc"].tolist() == [None, 1.0]


def test_equal_groups_are_dropped_only_when_filtering_is_on():
    data = batch([1.0, 1.0, 0.0, 1.0], ["a", "a", "b", "b"])
    ctx = context()
    assert len(stages.keep(data, ctx)) == 4
    assert ctx.metrics.values()["training/zero_variance_groups"] == 0.5
    kept = stages.keep(data, context(**{"algorithm.filter_groups.enable": True}))
    assert kept.non_tensor_batch["uid"].tolist() == ["b", "b"]


def test_groups_are_filtered_by_any_reward_detail():
    data = batch([1.0, 0.5, 0.0, 1.0], ["a", "a", "b", "b"])
    data.non_tensor_batch["acc"] = np.array([True, True, False, True], dtype=object)
    ctx = context(**{"algorithm.filter_groups.enable": True, "algorithm.filter_groups.metric": "acc"})
    assert stages.keep(data, ctx).non_tensor_batch["uid"].tolist() == ["b", "b"]


def test_an_endless_refill_stops_at_the_limit():
    limits = {"algorithm.filter_groups.enable": True, "algorithm.filter_groups.max_num_gen_batches": 2}
    ctx = context(**limits)
    ctx.begin(1, 0)
    ctx.count_gen_batch()
    ctx.count_gen_batch()
    with pytest.raises(DataError, match=r"2 batches of prompts were sampled, only 0 of 4 samples kept"):
        ctx.count_gen_batch()


def test_the_pool_hands_out_whole_batches_and_keeps_the_surplus():
    pool = SamplePool(rows=4)
    pool.add(batch([0.0] * 3, ["a", "a", "b"]))
    assert not pool.is_full()
    pool.add(batch([1.0] * 3, ["b", "c", "c"]))
    assert pool.is_full()
    taken = pool.take()
    assert taken.non_tensor_batch["uid"].tolist() == ["a", "a", "b", "b"]
    assert pool.peek().non_tensor_batch["uid"].tolist() == ["c", "c"]
    assert len(pool) == 2


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({}, False),
        ({"trainer.skip_old_log_prob": False}, True),
        ({"actor_rollout_ref.actor.ppo_epochs": 2}, True),
        ({"actor_rollout_ref.actor.ppo_mini_batch_size": 1}, True),
        ({"algorithm.use_kl_in_reward": True}, True),
    ],
)
def test_the_old_log_prob_pass_is_skipped_only_where_nothing_needs_it(changes, needed):
    assert context(**changes).needs_old_log_prob is needed


class Group:
    """A worker group that remembers what it was told to train on."""

    world_size = 1

    def __init__(self):
        self.calls = []

    def update_actor(self, data):
        self.calls.append((data.batch["advantages"][:, 0].tolist(), data.meta_info["more_updates"]))
        return [MetricSet()]


def test_mini_batches_follow_the_sample_order_and_end_the_schedule_step_once():
    data = batch([0.0] * 4, ["a", "a", "b", "b"])
    data.batch["advantages"] = torch.arange(4.0).unsqueeze(1).repeat(1, 4)
    group = Group()
    role = RoleHandle("actor", "trainable", group, mini_batch_size=1, epochs=2)
    stages.train(role, data, context())
    one_epoch = [([0.0, 1.0], True), ([2.0, 3.0], True)]
    assert group.calls == [*one_epoch, ([0.0, 1.0], True), ([2.0, 3.0], False)]


def test_kl_in_the_reward_is_charged_with_the_coefficient_before_its_update():
    # ALGORITHMS B.13: s, old, ref, beta=.1 -> r=[[-.02,.01,.95],[0,.4]], current_kl=.35
    data = DataProto.from_dict(
        tensors={
            "token_level_scores": torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.5, 0.0]]),
            "old_log_probs": torch.full((2, 3), -1.0),
            "ref_log_prob": torch.tensor([[-1.2, -0.9, -1.5], [-1.0, -2.0, float("nan")]]),
            "response_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
        }
    )
    ctx = context(**{"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": 0.1})
    metrics = stages.charge_kl(data, ctx.kl_controller)
    expected = torch.tensor([[-0.02, 0.01, 0.95], [0.0, 0.4, 0.0]])
    torch.testing.assert_close(data.batch["token_level_rewards"], expected, atol=1e-6, rtol=0)
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(0.35, abs=1e-6)


def test_prompt_uids_are_stable_and_differ_by_epoch_and_row():
    uids = {stages.prompt_uid(epoch, row) for epoch in range(3) for row in range(5)}
    assert len(uids) == 15
    assert stages.prompt_uid(0, 7) == stages.prompt_uid(0, 7)
