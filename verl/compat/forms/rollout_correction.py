"""The correction in the signatures that users' code calls: plain arguments in, metrics under upstream's names out."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from verl.algorithms.masked import zero_outside
from verl.algorithms.rollout_correction.correction import (
    Correction,
    correction_of,
    importance_sampling_of,
    is_metrics,
    weights_of,
)
from verl.algorithms.rollout_correction.mismatch import off_policy_metrics
from verl.algorithms.rollout_correction.ratios import Rows
from verl.algorithms.rollout_correction.rejection import rejection_mask, rejection_metrics
from verl.algorithms.rollout_correction.weight_metrics import weight_metrics
from verl.algorithms.rollout_correction.weights import Weights
from verl.config.schema.algorithm import Bounds, importance_sampling, rejections, weight_bounds
from verl.errors import ConfigError
from verl.protocol import DataProto
from verl.trainer.ppo.correction import use_rollout_log_probs

PREFIX = "rollout_corr/"


def compute_mismatch_is_metrics(
    rollout_is_weights: Tensor,
    log_ratio_for_metrics: Tensor,
    response_mask: Tensor,
    rollout_is_level: str,
    rollout_is_threshold: float,
    rollout_is_threshold_lower: float | None = None,
) -> dict[str, float]:
    """``rollout_is_*`` of weights before bounding (B, T); no veto is known here.

    Args:
        log_ratio_for_metrics: the log-weights that the extremes come from, (B, T) or (B, 1).
    """
    how = importance_sampling(rollout_is_threshold, rollout_is_threshold_lower, rollout_is_level, veto_threshold=None)
    weights, rows = _given_weights(rollout_is_weights, log_ratio_for_metrics, response_mask, rollout_is_level)
    return is_metrics(weights, rows, how)


def compute_mismatch_metrics(
    old_log_prob: Tensor, rollout_log_prob: Tensor | None, response_mask: Tensor
) -> dict[str, float]:
    """``mismatch_kl``, ``mismatch_k3_kl`` and the perplexities, see `off_policy_metrics`."""
    metrics = off_policy_metrics(old_log_prob, rollout_log_prob, response_mask)
    return {f"mismatch_{name}": value for name, value in metrics.items()}


def compute_rollout_rejection_mask(
    log_ratio: Tensor, response_mask: Tensor, rollout_rs: str = "token_k1", rollout_rs_threshold: Any = None
) -> tuple[Tensor, dict[str, float]]:
    """See `rejection_mask`; options and thresholds as they stand in the configuration."""
    options = rejections(rollout_rs, rollout_rs_threshold)
    return rejection_mask(zero_outside(log_ratio, response_mask), response_mask, options)


def compute_rs_metrics(
    option_name: str,
    rs_statistic: Tensor,
    response_mask: Tensor,
    seq_valid_mask: Tensor | None,
    level: str,
    per_sequence_values: Tensor | None,
    rollout_rs_threshold: float,
    rollout_rs_threshold_lower: float | None = None,
    apply_lower_threshold: bool = True,
) -> dict[str, float]:
    """``rollout_rs_<option_name>_*`` of a statistic; thresholds are on the scale of the statistic.

    Args:
        rs_statistic: (B, T), read at ``level`` token.
        per_sequence_values: (B,), read at the other levels.
        seq_valid_mask: (B,) rows that count; None takes those with a valid token.
    """
    rows = Rows.of(response_mask, rs_statistic.dtype)
    if seq_valid_mask is not None:
        rows = Rows(rows.mask & seq_valid_mask.bool()[:, None], rows.lengths, rows.filled & seq_valid_mask.bool())
    by_row = level != "token" and per_sequence_values is not None
    values = per_sequence_values if by_row else zero_outside(rs_statistic, response_mask)
    assert values is not None, "one of the two is given"
    lower = rollout_rs_threshold_lower if apply_lower_threshold else None
    return rejection_metrics(option_name, values, rows, rollout_rs_threshold, lower)


def compute_rollout_correction_weights(
    log_ratio: Tensor,
    response_mask: Tensor,
    rollout_is: str = "token",
    rollout_is_threshold: float | str = 2.0,
    rollout_is_batch_normalize: bool = False,
) -> tuple[Tensor, dict[str, float]]:
    """Weights (B, T), detached, and their ``rollout_is_*`` metrics."""
    bounds, zero = weight_bounds(rollout_is_threshold)
    ratio = zero_outside(log_ratio.detach(), response_mask)
    how = Correction(rollout_is, bounds, zero, rollout_is_batch_normalize)
    return weights_of(ratio, Rows.of(response_mask, ratio.dtype), how)


def compute_is_metrics(
    rollout_is_weights: Tensor,
    raw_rollout_is_weights: Tensor,
    log_ratio_for_metrics: Tensor,
    response_mask: Tensor,
    rollout_is: str,
    rollout_is_threshold: float,
    rollout_is_threshold_lower: float | None = None,
) -> dict[str, float]:
    """``rollout_is_*`` of the weights before bounding; ``rollout_is_weights``, those after it, are not looked at."""
    weights, rows = _given_weights(raw_rollout_is_weights, log_ratio_for_metrics, response_mask, rollout_is)
    lower = 1 / rollout_is_threshold if rollout_is_threshold_lower is None else rollout_is_threshold_lower
    return weight_metrics(weights, rows, rollout_is, Bounds(lower, rollout_is_threshold))


def compute_offpolicy_metrics(
    old_log_prob: Tensor, rollout_log_prob: Tensor | None, response_mask: Tensor
) -> dict[str, float]:
    """``kl``, ``k3_kl``, perplexities and chi-squared divergences, without a prefix."""
    return off_policy_metrics(old_log_prob, rollout_log_prob, response_mask, chi2=True)


def compute_rollout_corr_metrics_from_logprobs(
    log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor
) -> dict[str, float]:
    """The same under ``rollout_corr/``, from the current policy's log-probs."""
    metrics = compute_offpolicy_metrics(log_prob, rollout_log_prob, response_mask)
    return {f"{PREFIX}{name}": value for name, value in metrics.items()}


def _given_weights(raw: Tensor, log_raw: Tensor, response_mask: Tensor, level: str) -> tuple[Weights, Rows]:
    rows = Rows.of(response_mask, raw.dtype)
    raw = zero_outside(raw, response_mask)
    by_row = level != "token" and log_raw.dim() == 2
    return Weights(raw, log_raw[:, 0] if by_row else log_raw, raw), rows


def compute_rollout_correction_and_add_to_batch(
    batch: DataProto, rollout_corr_config: Any
) -> tuple[DataProto, dict[str, float]]:
    """Upstream's form of the newer correction: ``response_mask`` itself is replaced by what was not rejected."""
    tensors = batch.tensors
    how = Correction.of(rollout_corr_config)
    corrected = correction_of(tensors["old_log_probs"], tensors["rollout_log_probs"], tensors["response_mask"], how)
    if corrected.weights is not None:
        tensors["rollout_is_weights"] = corrected.weights
    tensors["response_mask"] = corrected.mask
    return batch, {f"rollout_corr/{name}": value for name, value in corrected.metrics.items()}


def apply_bypass_mode(batch: DataProto, rollout_corr_config: Any = None, policy_loss_config: Any = None) -> None:
    """Upstream's form of `use_rollout_log_probs`.

    The loss of the bypass mode follows from ``algorithm.rollout_correction`` where the actor is built; a policy loss
    section that is a plain dict is updated too.
    """
    use_rollout_log_probs(batch)
    if isinstance(policy_loss_config, dict):
        policy_loss_config.update(loss_mode="bypass_mode", rollout_correction=rollout_corr_config)
    elif policy_loss_config is not None and policy_loss_config.get("loss_mode") not in ("vanilla", "bypass_mode"):
        raise ConfigError("the bypass mode brings its own loss", key="actor_rollout_ref.actor.policy_loss.loss_mode")


def compute_rollout_importance_weights(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    rollout_is_level: str = "token",
    rollout_is_mode: str = "truncate",
    rollout_is_threshold: float | None = None,
    rollout_is_threshold_lower: float | None = None,
    rollout_is_veto_threshold: float | None = 1e-4,
) -> tuple[DataProto | None, dict[str, float]]:
    """Importance weights of a batch, bounded, and every metric of the mismatch (ALGORITHMS C.1 to C.4).

    Args:
        old_log_prob, rollout_log_prob, response_mask: (B, T), of the trainer and of the sampler.
        rollout_is_level: ``token``, ``sequence`` (product) or ``geometric`` (mean of a sequence's ratios).
        rollout_is_mode: ``truncate`` caps at the threshold, ``mask`` sets weights outside the bounds to 0.
        rollout_is_threshold: upper bound; None makes neither weights nor metrics.
        rollout_is_threshold_lower: None is 1 / ``rollout_is_threshold``.
        rollout_is_veto_threshold: a sequence with a token whose ratio is below it gets weight 0; None vetoes nothing.

    Returns:
        A batch with ``rollout_is_weights`` (B, T), float32, detached; and the metrics, prefixed ``mismatch/``. Both are
        empty (None, {}) without a threshold.

    Raises:
        ValueError: shapes that differ, an unknown level or mode, thresholds that make no sense.
    """
    if rollout_is_threshold is None:
        return None, {}
    how = importance_sampling(
        rollout_is_threshold, rollout_is_threshold_lower, rollout_is_level, rollout_is_mode, rollout_is_veto_threshold
    )
    corrected = importance_sampling_of(old_log_prob, rollout_log_prob, response_mask, how)
    assert corrected.weights is not None, "this form always makes weights"
    weights = DataProto.from_dict(tensors={"rollout_is_weights": corrected.weights})
    return weights, {f"mismatch/{name}": value for name, value in corrected.metrics.items()}


def compute_rollout_correction_and_rejection_mask(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    rollout_is: str | None = None,
    rollout_is_threshold: float | str | None = 2.0,
    rollout_is_batch_normalize: bool = False,
    rollout_rs: str | None = None,
    rollout_rs_threshold: float | str | None = None,
) -> tuple[DataProto | None, Tensor, dict[str, float]]:
    """A batch with ``rollout_is_weights`` (B, T) or None, the mask after rejection, and ``rollout_corr/`` metrics."""
    bounds, zero = weight_bounds(2.0 if rollout_is_threshold is None else rollout_is_threshold)
    rejected = rejections(rollout_rs, rollout_rs_threshold) if rollout_rs else ()
    how = Correction(rollout_is, bounds, zero, rollout_is_batch_normalize, rejected)
    corrected = correction_of(old_log_prob, rollout_log_prob, response_mask, how)
    weights = (
        None if corrected.weights is None else DataProto.from_dict(tensors={"rollout_is_weights": corrected.weights})
    )
    return weights, corrected.mask, {f"{PREFIX}{name}": value for name, value in corrected.metrics.items()}
