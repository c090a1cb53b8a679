"""Rejection and weights of the newer form, on the worked example: ratios (1, 1.2, 0.8), (3, 1) and (1, 5e-5, 1, 1)."""

from __future__ import annotations

import math

import pytest
import torch

from verl.algorithms.rollout_correction import Correction, correction_of
from verl.config import RolloutCorrectionConfig
from verl.config.schema.algorithm import rejections
from verl.errors import ConfigError
from verl.trainer.ppo.rollout_corr_helper import (
    compute_is_metrics,
    compute_offpolicy_metrics,
    compute_rollout_corr_metrics_from_logprobs,
    compute_rollout_correction_and_rejection_mask,
    compute_rollout_correction_weights,
    compute_rollout_rejection_mask,
    compute_rs_metrics,
)

MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]])
RATIO = torch.tensor([[1.0, 1.2, 0.8, 1.0], [3.0, 1.0, 1.0, 1.0], [1.0, 5e-5, 1.0, 1.0]])
LOG_RATIO = torch.where(MASK.bool(), RATIO.log(), float("nan"))
ROLLOUT = -torch.ones(3, 4)
OLD = ROLLOUT + RATIO.log()


def reject(options, thresholds):
    return compute_rollout_rejection_mask(LOG_RATIO, MASK, options, thresholds)


@pytest.mark.parametrize(
    ("option", "per_row"),
    [
        # means over a row of k1 = -log r, k3 = r - 1 - log r, and the largest k2 = (log r)^2 / 2
        ("seq_mean_k1", [0.013607, -0.549306, 2.475872]),
        ("seq_mean_k3", [0.013607, 0.450694, 2.225884]),
        ("seq_max_k2", [0.024897, 0.603474, 49.039533]),
        ("seq_sum_k1", [0.040822, -1.098612, 9.903488]),
        ("seq_sum_k2", [0.024897 + 0.016623, 0.603474, 49.039533]),
    ],
)
def test_statistics_of_the_worked_example(option, per_row):
    metrics = reject(option, "0.5_2.0" if option.endswith("k1") else 100.0)[1]
    prefix = f"rollout_rs_{option}_"
    assert metrics[f"{prefix}seq_max"] == pytest.approx(max(per_row), abs=1e-4)
    assert metrics[f"{prefix}seq_min"] == pytest.approx(min(per_row), abs=1e-4)
    assert metrics[f"{prefix}seq_mean"] == pytest.approx(sum(per_row) / 3, abs=1e-4)
    assert metrics[f"{prefix}mean"] == pytest.approx(sum(per_row) / 3, abs=1e-4), "over sequences, as it rejects them"


@pytest.mark.parametrize(
    ("options", "thresholds", "kept"),
    [
        ("token_k1", "0.9_2.0", [[1, 1, 0, 0], [0, 1, 0, 0], [1, 0, 1, 1]]),
        ("token_k1", 2.0, [[1, 1, 1, 0], [0, 1, 0, 0], [1, 0, 1, 1]]),  # 2.0 alone is 0.5 to 2.0
        ("token_k2", 0.02, [[1, 1, 0, 0], [0, 1, 0, 0], [1, 0, 1, 1]]),  # k2 of 1.2 is 0.0166, of 0.8 it is 0.0249
        ("token_k3", 0.95, [[1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 1, 1]]),  # k3 of 3 is 3 - 1 - 1.0986 = 0.9014
        ("seq_sum_k1", "0.5_2.0", [[1, 1, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0]]),  # products 0.96, 3, 5e-5
        ("seq_mean_k1", "0.5_2.0", [[1, 1, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0]]),  # roots 0.986, 1.732, 0.084
        ("seq_mean_k3", 0.1, [[1, 1, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0]]),
        ("seq_max_k2", 1.0, [[1, 1, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0]]),
        ("seq_mean_k3,token_k1", "0.5,0.9_4", [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]]),
        ("seq_mean_k3, seq_mean_k3", [0.1], [[1, 1, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0]]),
    ],
)
def test_what_stays_in_the_mask(options, thresholds, kept):
    mask, metrics = reject(options, thresholds)
    assert mask.tolist() == kept and mask.dtype == MASK.dtype
    assert metrics["rollout_rs_masked_fraction"] == pytest.approx(1 - sum(map(sum, kept)) / 9)
    hit = sum(sum(row) < n for row, n in zip(kept, (3, 2, 4))) / 3
    assert metrics["rollout_rs_seq_masked_fraction"] == pytest.approx(hit)


def test_bounds_of_k1_are_those_of_the_ratio_trainer_over_sampler():
    # 3.0 lies inside (0.5, 4), and 1/3 would not; 1/3 as the ratio is dropped
    mask, _ = compute_rollout_rejection_mask(torch.tensor([[3.0, 1 / 3]]).log(), torch.ones(1, 2), "token_k1", "0.5_4")
    assert mask.tolist() == [[1, 0]]


def test_options_do_not_see_what_others_rejected():
    both = reject("token_k1,seq_mean_k3", "0.9_2.0,0.5")[0]
    assert torch.equal(both, reject("seq_mean_k3,token_k1", "0.5,0.9_2.0")[0])
    assert torch.equal(both, reject("token_k1", "0.9_2.0")[0] * reject("seq_mean_k3", 0.5)[0])


@pytest.mark.parametrize(
    ("options", "thresholds", "words"),
    [
        ("token_k4", 1.0, r"no such way of rejecting. Got 'token_k4'.*Did you mean"),
        ("seq_max_k1", 1.0, r"no such way"),
        ("token_k1", None, r"needs a threshold"),
        ("token_k1", "2.0_0.5", r"below the upper one"),
        ("token_k1", 1.0, r"would not lie below"),
        ("token_k1", -1, r"must be positive"),
        ("token_k2", 0.0, r"upper bound only"),
        ("token_k3", "0.1_0.2", r"token_k3 is a divergence, which has an upper bound only"),
        ("token_k1,token_k2,token_k3", "2,3", r"3 options of rollout_rs need one threshold for all, or one for each"),
        ("token_k1,token_k1", "2,3", r"two thresholds for token_k1"),
        ("token_k2", "many", r"not a number. Got 'many'"),
    ],
)
def test_thresholds_that_make_no_sense_are_refused(options, thresholds, words):
    with pytest.raises(ConfigError, match=words):
        rejections(options, thresholds)


def test_a_token_without_mismatch_is_never_rejected():
    for option in ("token_k1", "seq_sum_k1", "seq_mean_k1"):
        mask, metrics = compute_rollout_rejection_mask(torch.zeros(3, 4), MASK, option, "0.999_1.001")
        assert torch.equal(mask, MASK) and metrics["rollout_rs_masked_fraction"] == 0


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.float32])
def test_the_mask_keeps_its_dtype(dtype):
    mask, _ = compute_rollout_rejection_mask(LOG_RATIO, MASK.to(dtype), "token_k1", "0.9_2.0")
    assert mask.dtype == dtype and mask.sum() == 6


def test_extreme_and_empty_rows_give_finite_numbers():
    ratio = torch.tensor([[1e4, -1e4], [float("inf"), float("-inf")], [0.0, 0.0]])
    mask = torch.tensor([[1, 1], [1, 0], [0, 0]])
    options = "token_k1,token_k2,token_k3,seq_sum_k3,seq_mean_k1,seq_max_k3"
    kept, metrics = compute_rollout_rejection_mask(ratio, mask, options, "2,3,3,3,2,3")
    assert kept.sum() == 0 and all(math.isfinite(value) for value in metrics.values())
    assert compute_rollout_rejection_mask(ratio, torch.zeros(3, 2), "token_k1", 2.0)[1] == {}


def test_weights_normalised_over_the_batch():
    token, metrics = compute_rollout_correction_weights(LOG_RATIO, MASK, "token", 2.0, True)
    assert metrics["rollout_is_batch_norm_factor"] == pytest.approx(1.000006, abs=1e-6)
    assert token[MASK.bool()].mean() == pytest.approx(1.0, abs=1e-6)
    sequence, metrics = compute_rollout_correction_weights(LOG_RATIO, MASK, "sequence", 2.0, True)
    assert metrics["rollout_is_batch_norm_factor"] == pytest.approx(0.986683, abs=1e-6)
    torch.testing.assert_close(sequence[:, 0], torch.tensor([0.972957, 2.026993, 0.000051]), atol=1e-6, rtol=0)


def test_a_batch_of_zero_weights_is_not_divided_by_its_mean():
    weights, metrics = compute_rollout_correction_weights(
        torch.full((1, 2), -9.0), torch.ones(1, 2), "token", "0.5_2", True
    )
    assert weights.tolist() == [[0.0, 0.0]] and metrics["rollout_is_batch_norm_factor"] == 0


def test_icepop_sets_weights_outside_its_bounds_to_zero():
    weights, metrics = compute_rollout_correction_weights(LOG_RATIO, MASK, "token", "0.9_2.5")
    expected = torch.tensor([[1, 1.2, 0, 0], [0, 1, 0, 0], [1, 0, 1, 1]])
    torch.testing.assert_close(weights, expected, atol=1e-6, rtol=0)
    assert metrics["rollout_is_oob_ratio"] == pytest.approx(3 / 9)


def test_a_cap_of_one_or_less_is_allowed_and_has_no_lower_bound():
    weights, metrics = compute_rollout_correction_weights(LOG_RATIO, MASK, "token", 1.0)
    assert weights.max() == 1.0 and metrics["rollout_is_ratio_fraction_low"] == 0


def test_metrics_of_the_mismatch_with_both_chi_squares():
    found = compute_offpolicy_metrics(OLD, ROLLOUT, MASK)
    assert found["chi2_token"] == pytest.approx(0.786667, abs=1e-5)
    assert found["chi2_seq"] == pytest.approx(2.3072, abs=1e-4)
    assert found["kl"] == pytest.approx(0.982855, abs=1e-5)
    prefixed = compute_rollout_corr_metrics_from_logprobs(OLD, ROLLOUT, MASK)
    assert prefixed == {f"rollout_corr/{name}": value for name, value in found.items()}


def test_weights_mask_and_metrics_together():
    weights, mask, metrics = compute_rollout_correction_and_rejection_mask(
        OLD, ROLLOUT, MASK, "sequence", 2.0, rollout_rs="seq_sum_k1", rollout_rs_threshold="0.5_2.0"
    )
    torch.testing.assert_close(weights.batch["rollout_is_weights"][:, 0], torch.tensor([0.96, 2.0, 5e-5]))
    assert mask.sum(-1).tolist() == [3, 0, 0]
    assert all(name.startswith("rollout_corr/") for name in metrics)
    nothing, same, metrics = compute_rollout_correction_and_rejection_mask(OLD, ROLLOUT, MASK)
    assert nothing is None and torch.equal(same, MASK) and "rollout_corr/kl" in metrics


def test_single_metric_functions_agree_with_the_whole():
    raw = torch.where(MASK.bool(), RATIO, 0.0)
    by_hand = compute_is_metrics(raw.clamp(max=2), raw, LOG_RATIO, MASK, "token", 2.0)
    whole = compute_rollout_correction_weights(LOG_RATIO, MASK, "token", 2.0)[1]
    assert by_hand == pytest.approx(whole, abs=1e-6)
    k3 = torch.where(MASK.bool(), RATIO - 1 - RATIO.log(), 0.0)
    found = compute_rs_metrics("token_k3", k3, MASK, None, "token", None, 0.5, None, False)
    assert found == pytest.approx({k: v for k, v in reject("token_k3", 0.5)[1].items() if "k3" in k}, abs=1e-6)
    rows = compute_rs_metrics("seq_mean_k3", k3, MASK, MASK.any(-1), "seq_mean", k3.sum(-1) / MASK.sum(-1), 0.5)
    assert rows == pytest.approx({k: v for k, v in reject("seq_mean_k3", 0.5)[1].items() if "k3" in k}, abs=1e-6)


PRESETS = {
    "disabled": (),
    "decoupled_token_is": ("token",),
    "decoupled_seq_is": ("sequence",),
    "decoupled_token_icepop": ("token", "zero"),
    "decoupled_seq_is_rs": ("sequence", "seq_sum_k1"),
    "decoupled_geo_rs": ("seq_mean_k1",),
    "decoupled_geo_rs_seq_tis": ("sequence", "seq_mean_k1"),
    "decoupled_geo_rs_token_tis": ("token", "seq_mean_k1"),
    "decoupled_k3_rs": ("seq_mean_k3",),
    "decoupled_k3_rs_seq_tis": ("sequence", "seq_mean_k3"),
    "decoupled_k3_rs_token_tis": ("token", "seq_mean_k3"),
    "bypass_ppo_clip": ("bypass",),
    "bypass_ppo_clip_geo_rs": ("bypass", "seq_mean_k1"),
    "bypass_ppo_clip_k3_rs": ("bypass", "seq_mean_k3"),
    "bypass_pg_is": ("bypass", "reinforce", "sequence"),
    "bypass_pg_token_icepop": ("bypass", "reinforce", "token", "zero"),
    "bypass_pg_geo_rs": ("bypass", "reinforce", "seq_mean_k1"),
    "bypass_pg_geo_rs_seq_tis": ("bypass", "reinforce", "sequence", "seq_mean_k1"),
    "bypass_pg_geo_rs_token_tis": ("bypass", "reinforce", "token", "seq_mean_k1"),
}


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_correction_that_works(name):
    config = getattr(RolloutCorrectionConfig, name)()
    how, parts = Correction.of(config), PRESETS[name]
    assert config.bypass_mode is ("bypass" in parts) and (config.loss_type == "reinforce") is ("reinforce" in parts)
    assert how.level == next((part for part in parts if part in ("token", "sequence")), None)
    assert how.zero_outside is ("zero" in parts)
    assert [r.option for r in how.rejections] == [part for part in parts if part.startswith("seq_")]
    found = correction_of(OLD, ROLLOUT, MASK, how)
    assert (found.weights is None) is (how.level is None)
    assert how.is_on is (how.level is not None or bool(how.rejections))
