"""The rollout correction in the dataflow: once per batch, on the controller, before advantages are estimated.

Both forms of the configuration end here: ``algorithm.rollout_is_*`` (metrics ``mismatch/``) and
``algorithm.rollout_correction.*`` (metrics ``rollout_corr/``). The mathematics is in
`verl.algorithms.rollout_correction`. Shapes: B rows, T response tokens.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from verl.algorithms.rollout_correction import Correction, CorrectionResult, correction_of, importance_sampling_of
from verl.algorithms.rollout_correction.upstream_forms import compute_rollout_correction
from verl.config import AlgoConfig
from verl.config.thresholds import importance_sampling
from verl.errors import ConfigError, DataError
from verl.protocol import DataProto

KEPT_MASK = "rollout_rs_mask"
"""Column (B, T): the response mask without what was rejected; losses use it, estimators and metrics do not."""


def correct(batch: DataProto, algorithm: AlgoConfig) -> dict[str, float]:
    """Adds ``rollout_is_weights`` and `KEPT_MASK` where they are configured; returns the prefixed metrics.

    Rejected tokens stay visible to the estimator: a reward that was given on one of them still counts, and so does the
    sample in its group's baseline. Without the two kinds of log-probs there is nothing to compare.
    """
    prefix, corrected = _corrected(batch, algorithm)
    if corrected is None:
        return {}
    if corrected.weights is not None and _applies_weights(algorithm):
        batch.tensors["rollout_is_weights"] = corrected.weights
    if corrected.mask is not batch.tensors["response_mask"]:
        batch.tensors[KEPT_MASK] = corrected.mask
    return {f"{prefix}/{name}": value for name, value in corrected.metrics.items()}


def _corrected(batch: DataProto, algorithm: AlgoConfig) -> tuple[str, CorrectionResult | None]:
    tensors = batch.tensors
    present = {"old_log_probs", "rollout_log_probs"} <= set(tensors.keys())
    newer = algorithm.rollout_correction
    if not present or newer.bypass_mode:
        _explain_missing(batch, algorithm, present)
        return "", None
    log_probs = tensors["old_log_probs"], tensors["rollout_log_probs"], tensors["response_mask"]
    if algorithm.rollout_is_threshold is not None:
        how = importance_sampling(
            algorithm.rollout_is_threshold,
            algorithm.rollout_is_threshold_lower,
            algorithm.rollout_is_level,
            algorithm.rollout_is_mode,
            algorithm.rollout_is_veto_threshold,
        )
        return "mismatch", importance_sampling_of(*log_probs, how)
    return "rollout_corr", correction_of(*log_probs, Correction.of(newer))


def _applies_weights(algorithm: AlgoConfig) -> bool:
    return algorithm.rollout_is or algorithm.rollout_is_threshold is None


def _explain_missing(batch: DataProto, algorithm: AlgoConfig, present: bool) -> None:
    wanted = algorithm.rollout_is_threshold is not None or Correction.of(algorithm.rollout_correction).is_on
    if wanted and not present:
        missing = [name for name in ("old_log_probs", "rollout_log_probs") if name not in batch.tensors.keys()]
        raise DataError(
            f"the rollout correction compares two policies, and the batch has no {' and no '.join(missing)}",
            fix="Does the rollout engine return log-probs (actor_rollout_ref.rollout.calculate_log_probs=true)?",
        )


def use_rollout_log_probs(batch: DataProto) -> None:
    """Bypass mode: the sampler's log-probs are the old ones, and no pass recomputes them."""
    if "rollout_log_probs" not in batch.tensors.keys():
        raise DataError(
            "the bypass mode takes the sampler's log-probs, and the rollout engine returned none",
            key="algorithm.rollout_correction.bypass_mode",
            fix="Set actor_rollout_ref.rollout.calculate_log_probs=true, or bypass_mode=false.",
        )
    batch.tensors["old_log_probs"] = batch.tensors["rollout_log_probs"]


def compute_rollout_importance_weights_and_add_to_batch(
    batch: DataProto, algorithm: AlgoConfig
) -> tuple[DataProto, dict[str, float]]:
    """``algorithm.rollout_is_*``: the batch, with weights if ``rollout_is`` is true, and the ``mismatch/`` metrics."""
    if algorithm.rollout_is_threshold is None or "rollout_log_probs" not in batch.tensors.keys():
        return batch, {}
    return batch, correct(batch, algorithm)


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
    rollout_rs_threshold: Any = None,
) -> tuple[DataProto | None, Tensor, dict[str, float]]:
    """A batch with ``rollout_is_weights`` (B, T) or None, the mask after rejection, and ``rollout_corr/`` metrics."""
    weights, mask, metrics = compute_rollout_correction(
        old_log_prob, rollout_log_prob, response_mask, rollout_is, rollout_is_threshold,
        rollout_is_batch_normalize, rollout_rs, rollout_rs_threshold,
    )  # fmt: skip
    made = None if weights is None else DataProto.from_dict(tensors={"rollout_is_weights": weights})
    return made, mask, metrics
