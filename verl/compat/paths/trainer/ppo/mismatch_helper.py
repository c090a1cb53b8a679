"""Rollout importance sampling under the path and the names of the framework that introduced it."""

from __future__ import annotations

from torch import Tensor

from verl.algorithms.rollout_correction import importance_sampling_of
from verl.algorithms.rollout_correction.upstream_forms import compute_mismatch_is_metrics as compute_is_metrics
from verl.algorithms.rollout_correction.upstream_forms import compute_mismatch_metrics
from verl.config.thresholds import importance_sampling
from verl.protocol import DataProto

__all__ = ["compute_is_metrics", "compute_mismatch_metrics", "compute_rollout_importance_weights"]


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
