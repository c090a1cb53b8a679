"""The rollout correction under the path and the names that users' code and recipes import from upstream."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from verl.algorithms.rollout_correction.upstream_forms import (
    compute_is_metrics,
    compute_offpolicy_metrics,
    compute_rollout_corr_metrics_from_logprobs,
    compute_rollout_correction,
    compute_rollout_correction_weights,
    compute_rollout_rejection_mask,
    compute_rs_metrics,
)
from verl.protocol import DataProto
from verl.trainer.ppo.correction import apply_bypass_mode, compute_rollout_correction_and_add_to_batch

__all__ = [
    "apply_bypass_mode",
    "compute_is_metrics",
    "compute_offpolicy_metrics",
    "compute_rollout_corr_metrics_from_logprobs",
    "compute_rollout_correction_and_add_to_batch",
    "compute_rollout_correction_and_rejection_mask",
    "compute_rollout_correction_weights",
    "compute_rollout_rejection_mask",
    "compute_rs_metrics",
]


def compute_rollout_correction_and_rejection_mask(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    rollout_is: str | None = None,
    rollout_is_threshold: float | str | None = 2.0,
    rollout_is_batch_normalize: bool = False,
    rollout_rs: str | None = None,
    rollout_rs_threshold: Any = None,
) -> tuple[DataProto | None, Tensor, dict[str, float]]:
    """A batch with ``rollout_is_weights`` (B, T) or None, the mask after rejection, and ``rollout_corr/`` metrics."""
    weights, mask, metrics = compute_rollout_correction(
        old_log_prob, rollout_log_prob, response_mask, rollout_is, rollout_is_threshold,
        rollout_is_batch_normalize, rollout_rs, rollout_rs_threshold,
    )  # fmt: skip
    made = None if weights is None else DataProto.from_dict(tensors={"rollout_is_weights": weights})
    return made, mask, metrics
