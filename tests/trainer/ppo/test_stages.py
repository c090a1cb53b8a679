"""The stages of a step on hand-made batches, without a model."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from verl.config import PPOTrainerConfig, replace
from verl.data.loader import prompt_uid
from verl.errors import DataError
from verl.metrics import Metric, MetricSet, notices
from verl.protocol import DataProto
from verl.trainer.ppo import group_filter, stages
from verl.trainer.ppo.context import RunState, StepContext
from verl.trainer.ppo.groups import GroupRows, judged
from verl.trainer.ppo.schedules import SYNC
from verl.trainer.ppo.scoring import measure_parts, tell_missing_parts
from verl.trainer.ppo.stream import GroupStream
from verl.workers.roles import RoleHandle


def config(**changes) -> PPOTrainerConfig:
    base = {"algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollout.n": 2, "data.train_batch_size": 2}
    return replace(PPOTrainerConfig(), **{**base, **changes})


def context(reward=None, **changes) -> StepContext:
    return RunState(config(**changes), reward or (lambda batch: {}), total_steps=10).open(0)


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


def kept(samples: DataProto, ctx: StepContext) -> DataProto:
    """The groups that dynamic sampling keeps."""
    groups = group_filter.group_numbers(samples)
    return samples.select_idxs(~stages.flat_groups(samples, groups, ctx)[0][groups])


def stream(ctx: StepContext) -> GroupStream:
    return GroupStream(SYNC.admission(ctx.config), ctx.run, version=0)


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
    scored = stages.score(data, {}, ctx)
    assert scored.batch["response_mask"].sum(-1).tolist() == [0, 3]
    assert scored.non_tensor_batch["acc"].tolist() == [None, 1.0]


class Hostile:
    """A reward function whose keys are columns of the run."""

    label = "compute_score in scorer.py"

    def __init__(self, **details):
        self.details = details

    def __call__(self, samples):
        return {"reward_tensor": torch.tensor([[0.0, 0, 0, 0], [0, 0, 2, 0]]), "reward_extra_info": self.details}


def test_keys_of_a_reward_function_are_no_columns_of_the_run():
    data = batch([0.0, 0.0], ["a", "a"])
    data.non_tensor_batch["finish_reason"] = np.array(["abort", "stop"], dtype=object)
    hides = Hostile(
        finish_reason=["stop", "abort"],
        unscorable=[False, True],
        uid=["x", "y"],
        response_mask=[1, 0],
        sample_index=[5, 5],
        acc=[1.0, 0.0],
        reward_uid=["p", "q"],
    )
    ctx = context(reward=hides)
    scored = stages.score(data, {}, ctx)
    columns = scored.non_tensor_batch
    assert columns["finish_reason"].tolist() == ["abort", "stop"] and columns["uid"].tolist() == ["a", "a"]
    assert scored.batch["response_mask"].sum(-1).tolist() == [0, 3], "the aborted one is masked, the other is not"
    assert columns["unscorable"].tolist() == [True, False] and "sample_index" not in columns
    assert ctx.metrics.values()["training/aborted_samples"] == 1
    stored = ["reward_finish_reason", "reward_unscorable", "reward_reward_uid", "reward_response_mask"]
    assert scored.meta_info[group_filter.DETAILS] == [*stored, "reward_sample_index", "acc", "reward_uid"]
    assert columns["reward_finish_reason"].tolist() == ["stop", "abort"]
    assert columns["reward_reward_uid"].tolist() == ["x", "y"] and columns["reward_uid"].tolist() == ["p", "q"]
    message = notices()["compute_score in scorer.py, key 'finish_reason'"]
    assert "'reward_finish_reason'" in message and "Return it under another name" in message


@pytest.mark.parametrize("name", ["reward", "seq_reward", "seq_final_reward"])
def test_a_key_that_means_the_score_gets_another_name(name):
    data = batch([0.0, 0.0], ["a", "a"])
    scored = stages.score(data, {}, context(reward=Hostile(**{name: [9.0, 9.0]})))
    assert group_filter.outcomes(scored, name).tolist() == [0.0, 2.0]
    assert name not in scored.non_tensor_batch and scored.non_tensor_batch[f"reward_{name}"].tolist() == [9.0, 9.0]
    message = notices()[f"compute_score in scorer.py, key {name!r}"]
    assert f"-> 'reward_{name}': the name means the score itself" in message


def test_columns_that_a_batch_has_before_scoring_stay_as_they_are():
    data = batch([0.0, 0.0], ["a", "a"])
    data.non_tensor_batch["spo_value"] = np.array([0.25, 0.75], dtype=object)
    names = ("spo_value", "trajectory", "rm_score", "index", "full_prompts", "raw_input_ids", "rm_truncated")
    scored = stages.score(data, {}, context(reward=Hostile(**{name: [9.0, 9.0] for name in names})))
    assert scored.non_tensor_batch["spo_value"].tolist() == [0.25, 0.75]
    assert not set(names[1:]) & set(scored.non_tensor_batch)
    assert all(scored.non_tensor_batch[f"reward_{name}"].tolist() == [9.0, 9.0] for name in names)


def test_two_keys_never_get_one_name():
    data = batch([0.0, 0.0], ["a", "a"])
    data.non_tensor_batch["reward_uid"] = np.array(["p", "q"], dtype=object)
    scored = stages.score(data, {}, context(reward=Hostile(uid=[1.0, 1.0], reward_uid=[2.0, 2.0])))
    columns = scored.non_tensor_batch
    assert columns["uid"].tolist() == ["a", "a"] and columns["reward_uid"].tolist() == ["p", "q"]
    stored = scored.meta_info[group_filter.DETAILS]
    assert [columns[name].tolist() for name in stored] == [[1.0, 1.0], [2.0, 2.0]]


def test_equal_groups_are_dropped_only_when_filtering_is_on():
    data = batch([1.0, 1.0, 0.0, 1.0], ["a", "a", "b", "b"])
    ctx = context()
    assert len(kept(data, ctx)) == 4
    assert ctx.metrics.values()["training/zero_variance_groups"] == 0.5
    left = kept(data, context(**{"algorithm.filter_groups.enable": True}))
    assert left.non_tensor_batch["uid"].tolist() == ["b", "b"]


def test_groups_are_filtered_by_any_reward_detail():
    data = batch([1.0, 0.5, 0.0, 1.0], ["a", "a", "b", "b"])
    data.non_tensor_batch["acc"] = np.array([True, True, False, True], dtype=object)
    ctx = context(**{"algorithm.filter_groups.enable": True, "algorithm.filter_groups.metric": "acc"})
    assert kept(data, ctx).non_tensor_batch["uid"].tolist() == ["b", "b"]


def test_a_group_with_one_sample_that_counts_compares_nothing():
    data = batch([1.0, 1.0, 0.0, 1.0, 0.0, 0.0], ["a", "a", "b", "b", "c", "c"])
    data.non_tensor_batch["unscorable"] = np.array([False, False, True, False, True, True])
    ctx = context(**{"algorithm.filter_groups.enable": True})
    done = judged([0, 1, 2], data, ctx, trims=False)
    assert [(group.why, group.compared) for group in done] == [
        ("filtered", True),
        ("filtered", False),
        ("filtered", False),
    ]


def test_an_endless_refill_stops_at_the_limit():
    limits = {"algorithm.filter_groups.enable": True, "algorithm.filter_groups.max_num_gen_batches": 2}
    ctx = context(**limits).run.open(1)
    stream(ctx)._count_gen_batches(2, ctx)
    with pytest.raises(DataError, match=r"2 batches of prompts were sampled, only 0 of 4 samples kept"):
        stream(ctx)._count_gen_batches(1, ctx)


def test_a_refill_without_a_limit_is_told_once_it_takes_long():
    ctx = context(**{"algorithm.filter_groups.enable": True}).run.open(3)
    for _ in range(9):
        stream(ctx)._count_gen_batches(1, ctx)
    assert notices() == {}
    stream(ctx)._count_gen_batches(1, ctx)
    assert "step 3 samples batch 10 of prompts, with 0 of 4" in notices()["algorithm.filter_groups.max_num_gen_batches"]


def test_a_step_takes_the_earliest_groups_and_the_surplus_waits_in_the_stream():
    groups = stream(context())
    for samples in (batch([0.0] * 2, ["a", "a"]), batch([1.0] * 4, ["b", "b", "c", "c"])):
        assert not groups.queue.is_ready()
        for rows in GroupRows.each(samples, 2):
            groups.queue.complete(groups.queue.admit("its prompt"), rows)
    assert [entry.samples.alone().non_tensor_batch["uid"][0] for entry in groups.queue.take()] == ["a", "b"]
    assert [list(held.non_tensor_batch["uid"]) for held in groups.held_samples()] == [["c", "c"]]


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
    assert context(**changes).run.needs_old_log_prob is needed


class Group:
    """A worker group that remembers what it was told to train on."""

    world_size = 1

    def __init__(self):
        self.calls = []

    def data_parallel_size(self, mesh_name):
        return 1

    def train(self, data, options):
        self.calls.append((data.batch["advantages"][:, 0].tolist(), options.more_updates))
        return [MetricSet()]


def test_mini_batches_follow_the_sample_order_and_end_the_schedule_step_once():
    data = batch([0.0] * 4, ["a", "a", "b", "b"])
    data.batch["advantages"] = torch.arange(4.0).unsqueeze(1).repeat(1, 4)
    group = Group()
    role = RoleHandle("actor", "trainable", group, mini_batch_size=1, epochs=2)
    stages.train(role, data, context())
    one_epoch = [([0.0, 1.0], True), ([2.0, 3.0], True)]
    assert group.calls == [*one_epoch, ([0.0, 1.0], True), ([2.0, 3.0], False)]


@pytest.mark.parametrize("balances", [True, False])
def test_rows_that_fill_up_the_ranks_are_the_shortest_and_masked(balances):
    class Five(Group):
        def data_parallel_size(self, mesh_name):
            return 5

        def train(self, data, options):
            self.calls.append((data.batch["attention_mask"].sum(-1) - 1, data.batch["response_mask"].sum(-1)))
            return [MetricSet()]

    group, data = Five(), batch([0.0] * 4, list("abcd"), [3, 1, 4, 2])
    ctx = context(**{"trainer.balance_batch": balances, "actor_rollout_ref.rollout.n": 1})
    stages.train(RoleHandle("actor", "trainable", group, mini_batch_size=2), data, ctx)
    # Mini-batches of two rows on five ranks: the shorter one is there three times more.
    assert [sorted(lengths.tolist()) for lengths, _ in group.calls] == [[1, 1, 1, 1, 3], [2, 2, 2, 2, 4]]
    assert [sorted(mask.tolist()) for _, mask in group.calls] == [[0, 0, 0, 1, 3], [0, 0, 0, 2, 4]]
    assert data.batch["response_mask"].sum() == 10, "the batch keeps its masks"


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
    metrics = stages.charge_kl(data, ctx.run.kl_controller)
    expected = torch.tensor([[-0.02, 0.01, 0.95], [0.0, 0.4, 0.0]])
    torch.testing.assert_close(data.batch["token_level_rewards"], expected, atol=1e-6, rtol=0)
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(0.35, abs=1e-6)


def test_prompt_uids_are_stable_and_differ_by_epoch_and_row():
    uids = {prompt_uid(epoch, row) for epoch in range(3) for row in range(5)}
    assert len(uids) == 15
    assert prompt_uid(0, 7) == prompt_uid(0, 7)


def test_masking_a_sample_does_not_write_into_memory_that_workers_share():
    data = batch([0.0, 1.0], ["a", "a"])
    shared = data.batch["response_mask"].numpy()
    shared.flags.writeable = False
    data.batch["response_mask"] = torch.from_numpy(shared)
    reward = {"reward_tensor": torch.zeros(2, 4), "unscorable": [True, False]}
    stages.score(data, {}, context(reward=lambda _: reward))
    assert data.batch["response_mask"].sum(-1).tolist() == [0, 3]
    assert shared.sum() == 6, "the shared memory is as it was"


def test_an_aborted_sample_is_masked_counted_and_in_no_baseline():
    data = batch([1.0, 0.0, 0.25], ["a", "a", "a"])
    data.non_tensor_batch["finish_reason"] = np.array(["stop", "abort", "length"], dtype=object)
    ctx = context(reward=lambda d: {"reward_tensor": d.batch["token_level_scores"]})
    stages.score(data, {}, ctx)
    stages.add_advantages(data, ctx)
    assert data.batch["response_mask"].sum(-1).tolist() == [3, 0, 3]
    assert ctx.metrics.values()["training/aborted_samples"] == 1
    # mean 0.625 and sample std 0.53033 of the two that ended
    expected = torch.tensor([0.7071054, 0.0, -0.7071054])
    torch.testing.assert_close(data.batch["advantages"][:, 0], expected, atol=1e-5, rtol=0)


def test_a_single_sample_is_kept_and_a_group_that_differs_in_a_failed_sample_alone_is_not():
    filtering = {"algorithm.filter_groups.enable": True}
    data = batch([1.0, 1.0, 1.0, 0.0], ["a", "b", "b", "b"])
    assert kept(data, context(**filtering)).non_tensor_batch["uid"].tolist() == ["a", "b", "b", "b"]
    data.non_tensor_batch["unscorable"] = np.array([False, False, False, True])
    assert kept(data, context(**filtering)).non_tensor_batch["uid"].tolist() == ["a"]


def test_rounding_does_not_make_a_difference():
    data = batch([0.1 + 0.2, 0.3, 0.0, 1e-6], ["a", "a", "b", "b"])
    left = kept(data, context(**{"algorithm.filter_groups.enable": True}))
    assert left.non_tensor_batch["uid"].tolist() == ["b", "b"]


@pytest.mark.parametrize("metric", [None, "reward", "score", "seq_reward", "seq_final_reward"])
def test_every_name_of_the_sequence_reward_filters_by_it(metric):
    data = batch([1.0, 1.0, 0.0, 1.0], ["a", "a", "b", "b"])
    ctx = context(**{"algorithm.filter_groups.enable": True, "algorithm.filter_groups.metric": metric})
    assert kept(data, ctx).non_tensor_batch["uid"].tolist() == ["b", "b"]


def test_one_varying_reward_of_several_keeps_a_group():
    data = batch([1.0, 1.0, 0.0, 0.0], ["a", "a", "b", "b"])
    data.non_tensor_batch["style"] = np.array([0.0, 1.0, 0.5, 0.5], dtype=object)
    data.non_tensor_batch["right"] = np.array([1.0, 1.0, 0.0, 0.0], dtype=object)
    ctx = context(**{"algorithm.filter_groups.enable": True})
    ctx.run.config = replace(
        ctx.config, **{"algorithm.adv_estimator": "gdpo", "algorithm.gdpo_reward_keys": ["style", "right"]}
    )
    assert kept(data, ctx).non_tensor_batch["uid"].tolist() == ["a", "a"]


def test_each_reward_that_is_normalised_apart_is_shown():
    metrics = MetricSet()
    measure_parts({"style": [0.0, 1.0, None, 0.5], "other": [7.0]}, ["style", "absent"], metrics)
    found = metrics.values()
    assert set(found) == {f"gdpo/style/{name}" for name in ("mean", "std", "max", "min")}
    assert found["gdpo/style/mean"] == 0.5 and found["gdpo/style/std"] == pytest.approx((1 / 6) ** 0.5)
    assert found["gdpo/style/max"] == 1.0 and found["gdpo/style/min"] == 0.0


def test_a_sample_that_lacks_a_reward_is_told_unless_it_is_left_out():
    tell_missing_parts({"style": [0.0, None, 1.0], "right": [None, 1.0, 1.0]}, ["style", "right"], [True, False, False])
    (name,) = notices()
    assert name == "algorithm.gdpo_reward_keys (style)" and notices()[name].startswith("1 of 3 samples")


def test_the_share_of_groups_that_teach_nothing_is_told():
    data = batch([1.0, 0.0, 0.5, 0.5], ["a", "a", "b", "b"])
    ctx = context()
    stages.add_advantages(data, ctx)
    assert ctx.metrics.values()["training/zero_advantage_groups"] == 0.5


def test_rejection_shrinks_the_mask_that_is_trained_on():
    data = batch([0.0] * 2, ["a", "a"])
    data.batch["advantages"] = torch.ones(2, 4)
    data.batch["rollout_rs_mask"] = torch.tensor([[1, 0, 0, 0], [0, 0, 0, 0]])
    seen = []

    class Actor(Group):
        def train(self, data, options):
            seen.append(data.batch["response_mask"])
            return [MetricSet({"rollout_corr/kl": Metric(1.0), "pg_loss": Metric(2.0)})]

    ctx = context(**{"data.train_batch_size": 1})
    stages.train(RoleHandle("actor", "trainable", Actor(), mini_batch_size=1), data, ctx)
    assert torch.cat(seen).tolist() == [[1, 0, 0, 0], [0, 0, 0, 0]]
    assert data.batch["response_mask"].sum() == 6
    assert {"rollout_corr/kl", "actor/pg_loss"} <= set(ctx.metrics.values()), "an area of its own stays"


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({"algorithm.rollout_is_threshold": 2.0}, True),
        ({"algorithm.rollout_correction.rollout_is": "token"}, True),
        ({"algorithm.rollout_correction.rollout_rs": "token_k2"}, True),
        ({"algorithm.rollout_correction.bypass_mode": True, "actor_rollout_ref.actor.ppo_epochs": 2}, False),
    ],
)
def test_a_correction_needs_the_old_log_probs_and_the_bypass_mode_leaves_them_out(changes, needed):
    ctx = context(**changes)
    assert ctx.run.needs_old_log_prob is needed
    assert ctx.run.bypasses_old_log_prob is ("algorithm.rollout_correction.bypass_mode" in changes)


def test_what_an_estimator_names_decides_what_the_dataflow_makes():
    ctx = context()
    assert not ctx.run.needs_reward_baselines and not ctx.run.needs_sum_pi_squared
    ctx.run.estimator = lambda token_level_rewards, response_mask, reward_baselines, sum_pi_squared, old_log_probs: None
    assert ctx.run.needs_reward_baselines and ctx.run.needs_sum_pi_squared and ctx.run.needs_old_log_prob


def test_tokens_are_counted_for_each_data_parallel_rank():
    """Two ranks, mini-batches of four rows, each with a prompt of one token and an answer of four or of one."""

    class Group:
        def data_parallel_size(self, mesh):
            assert mesh == "model"
            return 2

    data = batch([0.0] * 8, list("abcdefgh"), [4, 4, 1, 1, 4, 4, 1, 1])
    roles = {"actor": RoleHandle("actor", "trainable", Group(), mini_batch_size=4)}
    ctx = context(**{"actor_rollout_ref.rollout.n": 1})
    stages.measure_balance([data], roles, ctx)
    # As it is, each half of the batch has 5 + 5 + 2 + 2 tokens. In a mini-batch each rank gets a long and a short row.
    assert balance_of(ctx) == {
        "min": 14,
        "max": 14,
        "minmax_diff": 0,
        "balanced_min": 14,
        "balanced_max": 14,
        "mean": 14,
    }

    # With four more rows: 24 tokens in the first half of all twelve, 18 in the second.
    stages.measure_balance([data, batch([0.0] * 4, list("ijkl"), [4, 4, 1, 1])], roles, ctx)
    assert balance_of(ctx) == {
        "min": 18,
        "max": 24,
        "minmax_diff": 6,
        "balanced_min": 21,
        "balanced_max": 21,
        "mean": 21,
    }
    assert ctx.metrics.values()["perf/total_num_tokens"] == 42

    ctx = context(**{"actor_rollout_ref.rollout.n": 1})
    stages.measure_balance([batch([0.0] * 4, list("abcd"), [4, 4, 1, 1])], roles, ctx)
    assert balance_of(ctx) == {"min": 4, "max": 10, "minmax_diff": 6, "balanced_min": 7, "balanced_max": 7, "mean": 7}

    ctx = context(**{"actor_rollout_ref.rollout.n": 1, "trainer.balance_batch": False})
    stages.measure_balance([batch([0.0] * 4, list("abcd"), [4, 4, 1, 1])], roles, ctx)
    assert balance_of(ctx) == {"min": 4, "max": 10, "minmax_diff": 6, "balanced_min": 4, "balanced_max": 10, "mean": 7}


def balance_of(ctx):
    named = {name: value for name, value in ctx.metrics.values().items() if name.startswith("global_seqlen/")}
    return {name.removeprefix("global_seqlen/"): value for name, value in named.items()}


def test_stages_speak_little_of_what_is_around_the_algorithm():
    text = Path(stages.__file__).read_text()
    around = re.compile(r"ledger|accounting|journal|replay|experts|unfinished|in work|teachers")
    assert sum(bool(around.search(line)) for line in text.splitlines()) <= 5
