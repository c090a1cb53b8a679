"""Rollout importance sampling: levels, modes, veto, every metric, with the numbers of the worked example.

Three rows of 3, 2 and 4 tokens whose ratios trainer/sampler are (1, 1.2, 0.8), (3, 1) and (1, 5e-5, 1, 1). The
sampler's log-prob is -1 everywhere, the upper bound 2 (so the lower one 0.5), the veto threshold 1e-4.
Row 2 alone is vetoed.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.errors import ConfigError
from verl.metrics import notices
from verl.trainer.ppo.mismatch_helper import (
    compute_is_metrics,
    compute_mismatch_metrics,
    compute_rollout_importance_weights,
)

NAN, INF = float("nan"), float("inf")
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]])
RATIO = torch.tensor([[1.0, 1.2, 0.8, 1.0], [3.0, 1.0, 1.0, 1.0], [1.0, 5e-5, 1.0, 1.0]])
ROLLOUT = torch.where(MASK.bool(), -1.0, NAN)
OLD = torch.where(MASK.bool(), -1.0 + RATIO.log(), INF)  # what stands in padding must not matter

GEO = 0.986485  # (1 * 1.2 * 0.8) ** (1 / 3)
WEIGHTS = {
    ("token", "truncate"): [[1, 1.2, 0.8, 0], [2, 1, 0, 0], [0, 0, 0, 0]],
    ("token", "mask"): [[1, 1.2, 0.8, 0], [0, 1, 0, 0], [0, 0, 0, 0]],
    ("sequence", "truncate"): [[0.96] * 3 + [0], [2, 2, 0, 0], [0, 0, 0, 0]],
    ("sequence", "mask"): [[0.96] * 3 + [0], [0, 0, 0, 0], [0, 0, 0, 0]],
    ("geometric", "truncate"): [[GEO] * 3 + [0], [1.732051, 1.732051, 0, 0], [0, 0, 0, 0]],
    ("geometric", "mask"): [[GEO] * 3 + [0], [1.732051, 1.732051, 0, 0], [0, 0, 0, 0]],
}
METRICS = {
    "mean": (1.111117, 0.986689, 0.751102),
    "std": (0.380383, 0.577658, 0.475561),
    "eff_sample_size": (0.885064, 0.744730, 0.794805),
    "max": (3, 3, 1.732051),
    "min": (5e-5, 5e-5, 0.084090),
    "ratio_fraction_high": (1 / 9, 1 / 3, 0),
    "ratio_fraction_low": (1 / 9, 1 / 3, 4 / 9),
    "seq_mean": (1.250004, 1.320017, 0.934208),
    "seq_std": (0.661433, 1.532036, 0.825223),
    "seq_max": (2, 3, 1.732051),
    "seq_min": (0.750012, 5e-5, 0.084090),
    "seq_max_deviation": (1.0, 2.0, 0.915910),
    "seq_fraction_high": (0, 1 / 3, 0),
    "seq_fraction_low": (0, 1 / 3, 1 / 3),
    "p25": (1, 5e-5, 0.084090),
    "p50": (1, 0.96, GEO),
    "p75": (1, 0.96, GEO),
    "p95": (2.28, 3, 1.732051),
    "p99": (2.856, 3, 1.732051),
    "masked_fraction": (2 / 9, 2 / 3, 4 / 9),
    "seq_masked_fraction": (2 / 3, 2 / 3, 1 / 3),
    "veto_fraction": (1 / 3, 1 / 3, 1 / 3),
    "catastrophic_token_fraction": (1 / 9, 1 / 9, 1 / 9),
    "threshold_upper": (2, 2, 2),
    "threshold_lower": (0.5, 0.5, 0.5),
    "veto_threshold": (1e-4, 1e-4, 1e-4),
}
MISMATCH = {
    "mismatch_kl": 0.982855,
    "mismatch_k3_kl": 1.093972,
    "mismatch_training_ppl": 12.216975,
    "mismatch_training_log_ppl": 1.646724,
    "mismatch_rollout_ppl": 2.718282,
    "mismatch_rollout_log_ppl": 1.0,
    "mismatch_log_ppl_diff": 0.646724,
    "mismatch_log_ppl_abs_diff": 1.012928,
    "mismatch_log_ppl_diff_max": 2.475872,
    "mismatch_log_ppl_diff_min": -0.549306,
    "mismatch_ppl_ratio": 4.494374,
}
LEVELS = ("token", "sequence", "geometric")


def weigh(level="token", mode="truncate", old=OLD, rollout=ROLLOUT, mask=MASK, threshold=2.0, **more):
    found, metrics = compute_rollout_importance_weights(
        old, rollout, mask, rollout_is_level=level, rollout_is_mode=mode, rollout_is_threshold=threshold, **more
    )
    return found.batch["rollout_is_weights"], metrics


def is_close(found, expected):
    torch.testing.assert_close(found, torch.tensor(expected, dtype=found.dtype), atol=1e-5, rtol=1e-5)


def test_token_level_truncate():
    weights, metrics = weigh("token", "truncate")
    is_close(weights, WEIGHTS["token", "truncate"])
    assert weights.dtype == torch.float32 and not weights.requires_grad
    assert metrics["mismatch/rollout_is_mean"] == pytest.approx(1.111117, rel=1e-5, abs=1e-5)
    assert "mismatch/rollout_is_masked_fraction" not in metrics, "only the mask mode masks"


@pytest.mark.parametrize(("level", "mode"), WEIGHTS)
def test_weights_of_every_level_and_mode(level, mode):
    is_close(weigh(level, mode)[0], WEIGHTS[level, mode])


@pytest.mark.parametrize("level", LEVELS)
def test_every_metric_of_the_worked_example(level):
    metrics = weigh(level, "mask")[1]
    expected = {f"rollout_is_{name}": values[LEVELS.index(level)] for name, values in METRICS.items()} | MISMATCH
    assert {name.removeprefix("mismatch/") for name in metrics} == set(expected)
    for name, value in expected.items():
        assert metrics[f"mismatch/{name}"] == pytest.approx(value, rel=1e-5, abs=1e-5), name


def test_the_geometric_weight_is_the_root_of_the_sequence_weight():
    calm = {"old": torch.where(MASK.bool(), -1 + RATIO.clamp(0.9, 1.1).log(), 0.0)}
    sequence, geometric = weigh("sequence", **calm)[0], weigh("geometric", **calm)[0]
    lengths = MASK.sum(-1, keepdim=True)
    torch.testing.assert_close(geometric, torch.where(MASK.bool(), sequence ** (1 / lengths), 0.0), atol=1e-6, rtol=0)


@pytest.mark.parametrize("level", LEVELS)
def test_without_a_veto_the_catastrophic_row_keeps_its_weight(level):
    weights, metrics = weigh(level, rollout_is_veto_threshold=None)
    assert (weights[2] > 0).all()
    assert metrics["mismatch/rollout_is_veto_fraction"] == 0
    assert metrics["mismatch/rollout_is_catastrophic_token_fraction"] == 0
    assert metrics["mismatch/rollout_is_veto_threshold"] == 0


def test_the_veto_looks_at_ratios_before_any_clamp():
    old = torch.tensor([[-1.0, -40.0], [-1.0, -1.0]])  # a ratio of exp(-39), far beyond the clamp at exp(-20)
    mask, rollout = torch.ones(2, 2), -torch.ones(2, 2)
    weights, metrics = weigh("token", old=old, rollout=rollout, mask=mask, rollout_is_veto_threshold=1e-15)
    is_close(weights, [[0, 0], [1, 1]])
    assert metrics["mismatch/rollout_is_min"] == pytest.approx(math.exp(-20))


def test_a_lower_bound_replaces_the_inverse_of_the_upper_one():
    weights, metrics = weigh("token", "mask", rollout_is_threshold_lower=0.9)
    is_close(weights[0], [1, 1.2, 0, 0])
    assert metrics["mismatch/rollout_is_masked_fraction"] == pytest.approx(3 / 9)
    assert metrics["mismatch/rollout_is_threshold_lower"] == 0.9


def test_bounds_are_a_closed_interval():
    old = torch.tensor([[math.log(2.0), math.log(0.5), 0.0]], dtype=torch.float64)
    weights, _ = weigh("token", "mask", old=old, rollout=torch.zeros(1, 3, dtype=torch.float64), mask=torch.ones(1, 3))
    is_close(weights, [[2.0, 0.5, 1.0]])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_equal_policies_have_weight_one_and_no_mismatch(level, mode):
    log_probs = -torch.rand(5, 7) * 3
    mask = (torch.arange(7) < torch.tensor([[7], [3], [1], [5], [2]])).long()
    weights, metrics = weigh(level, mode, old=log_probs, rollout=log_probs, mask=mask)
    assert torch.equal(weights, mask.float())
    expected = {"rollout_is_mean": 1, "rollout_is_eff_sample_size": 1, "rollout_is_std": 0, "rollout_is_p95": 1}
    expected |= {"rollout_is_veto_fraction": 0, "mismatch_kl": 0, "mismatch_k3_kl": 0, "mismatch_ppl_ratio": 1}
    expected |= {"rollout_is_seq_mean": 1, "rollout_is_seq_std": 0, "rollout_is_seq_max_deviation": 0}
    for name, value in expected.items():
        assert metrics[f"mismatch/{name}"] == pytest.approx(value, abs=1e-6), name


def test_no_threshold_makes_nothing():
    assert compute_rollout_importance_weights(OLD, ROLLOUT, MASK) == (None, {})


def test_half_precision_log_probs_are_computed_in_float32():
    torch.manual_seed(0)
    old, rollout = (-torch.rand(4, 6).to(torch.bfloat16) for _ in range(2))
    weights, metrics = weigh(old=old, rollout=rollout, mask=torch.ones(4, 6))
    exact, wanted = weigh(old=old.float(), rollout=rollout.float(), mask=torch.ones(4, 6))
    assert weights.dtype == torch.float32 and torch.equal(weights, exact) and metrics == wanted


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("gap", [1e4, -1e4, 90.0, -90.0])
def test_extreme_ratios_stay_finite_and_bounded(level, gap):
    old = torch.tensor([[-1.0, -1.0 + gap, -1.0], [-1.0, -1.0, -1.0]])
    weights, metrics = weigh(level, old=old, rollout=-torch.ones(2, 3), mask=torch.ones(2, 3))
    assert weights.isfinite().all() and weights.max() <= 2.0
    for name, value in metrics.items():
        ppl = "ppl" in name and gap < -700  # the perplexity of a token of probability exp(-1e4) is beyond any float
        assert math.isfinite(value) or ppl, name


def test_an_empty_row_is_in_no_statistic_over_sequences():
    mask = torch.cat([MASK, torch.zeros(1, 4, dtype=torch.long)])
    old, rollout = (torch.cat([x, torch.full((1, 4), NAN)]) for x in (OLD, ROLLOUT))
    for level in LEVELS:
        weights, metrics = weigh(level, "mask", old=old, rollout=rollout, mask=mask)
        assert torch.equal(weights[3], torch.zeros(4))
        assert metrics == pytest.approx(weigh(level, "mask")[1], abs=1e-6)


def test_a_batch_without_a_valid_token_has_zero_weights_and_says_so():
    weights, metrics = weigh(mask=torch.zeros_like(MASK))
    assert torch.equal(weights, torch.zeros(3, 4)) and metrics == {}
    assert "rollout_correction" in notices()


def test_a_single_token_has_no_spread():
    one = torch.tensor([[1]])
    metrics = weigh("sequence", old=torch.tensor([[-0.5]]), rollout=torch.tensor([[-1.0]]), mask=one)[1]
    assert metrics["mismatch/rollout_is_std"] == metrics["mismatch/rollout_is_seq_std"] == 0
    assert metrics["mismatch/rollout_is_mean"] == pytest.approx(math.exp(0.5))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"level": "tokens"}, r"rollout_is_level.*unknown level.*'tokens'.*token, sequence, geometric.*Did you mean"),
        ({"mode": "clip"}, r"rollout_is_mode.*unknown mode.*truncate, mask"),
        ({"threshold": 0.0}, r"rollout_is_threshold.*must be positive"),
        ({"threshold": -2.0}, r"rollout_is_threshold.*must be positive"),
        ({"threshold": 1.0}, r"rollout_is_threshold.*1 / upper, which would not lie below"),
        ({"threshold": NAN}, r"rollout_is_threshold.*not a finite number"),
        ({"rollout_is_threshold_lower": 2.0}, r"threshold_lower.*below the upper one, 2. Got 2.0"),
        ({"rollout_is_threshold_lower": 0.0}, r"threshold_lower.*must be positive"),
        ({"rollout_is_veto_threshold": 0.0}, r"veto_threshold.*Got 0.0. Allowed: above 0 and below 1"),
        ({"rollout_is_veto_threshold": 1.5}, r"veto_threshold.*null for no veto"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        weigh(**changes)


@pytest.mark.parametrize("which", ["old", "rollout", "mask"])
def test_shapes_that_differ_are_refused(which):
    with pytest.raises(ValueError, match=r"one shape.*old_log_prob \(\d, \d\)"):
        weigh(**{which: torch.ones(3, 3)})


def test_metrics_by_themselves_carry_no_prefix():
    assert compute_mismatch_metrics(OLD, ROLLOUT, MASK) == pytest.approx(MISMATCH, rel=1e-5, abs=1e-5)
    assert set(compute_mismatch_metrics(OLD, None, MASK)) == {"mismatch_training_ppl", "mismatch_training_log_ppl"}
    found = compute_is_metrics(RATIO, RATIO.log(), MASK, "token", 2.0, None)
    assert found["rollout_is_mean"] == pytest.approx(1.111117, rel=1e-5, abs=1e-5)


BATCHES = st.integers(1, 6).flatmap(
    lambda rows: st.tuples(
        st.lists(st.integers(1, 5), min_size=rows, max_size=rows), st.integers(0, 2**31 - 1), st.sampled_from(LEVELS)
    )
)


def random_batch(lengths, seed):
    g = torch.Generator().manual_seed(seed)
    mask = (torch.arange(5) < torch.tensor(lengths)[:, None]).long()
    old, rollout = (-3 * torch.rand(len(lengths), 5, generator=g) for _ in range(2))
    return old, rollout, mask


@settings(max_examples=25, deadline=None)
@given(BATCHES)
def test_row_order_and_padding_change_nothing(drawn):
    lengths, seed, level = drawn
    old, rollout, mask = random_batch(lengths, seed)
    weights, metrics = weigh(level, "mask", old=old, rollout=rollout, mask=mask)
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(seed))
    wide = [torch.nn.functional.pad(x[order], (0, 3), value=v) for x, v in ((old, NAN), (rollout, INF), (mask, 0))]
    again, same = weigh(level, "mask", old=wide[0], rollout=wide[1], mask=wide[2])
    torch.testing.assert_close(again[:, :5], weights[order], atol=1e-6, rtol=1e-6)
    assert same == pytest.approx(metrics, rel=1e-5, abs=1e-5)


@settings(max_examples=25, deadline=None)
@given(BATCHES)
def test_weights_do_not_depend_on_how_rows_are_spread_over_ranks(drawn):
    lengths, seed, level = drawn
    old, rollout, mask = random_batch(lengths, seed)
    whole = weigh(level, old=old, rollout=rollout, mask=mask)[0]
    half = len(lengths) // 2
    parts = [weigh(level, old=old[s], rollout=rollout[s], mask=mask[s])[0] for s in (slice(half), slice(half, None))]
    torch.testing.assert_close(torch.cat(parts), whole, atol=1e-6, rtol=1e-6)


@settings(max_examples=25, deadline=None)
@given(BATCHES, st.floats(1.01, 5.0))
def test_truncated_weights_are_capped_and_masked_ones_are_zero_or_inside(drawn, threshold):
    lengths, seed, level = drawn
    old, rollout, mask = random_batch(lengths, seed)
    given = {"old": old, "rollout": rollout, "mask": mask, "threshold": threshold, "rollout_is_veto_threshold": None}
    assert weigh(level, "truncate", **given)[0].max() <= threshold + 1e-6
    masked = weigh(level, "mask", **given)[0]
    inside = (masked >= 1 / threshold - 1e-6) & (masked <= threshold + 1e-6)
    assert ((masked == 0) | inside).all()
