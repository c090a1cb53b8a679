"""The rollout correction in the dataflow: once per batch, on the controller, before advantages are estimated.

Both forms of the configuration end here: ``algorithm.rollout_is_*`` (metrics ``mismatch/``) and
``algorithm.rollout_correction.*`` (metrics ``rollout_corr/``). The mathematics is in
`verl.algorithms.rollout_correction`. Shapes: B rows, T response tokens.
"""

from __future__ import annotations

from verl.algorithms.rollout_correction import Correction, CorrectionResult, correction_of, importance_sampling_of
from verl.config import AlgoConfig
from verl.config.schema.algorithm import importance_sampling
from verl.errors import DataError
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
    is_corrected = algorithm.rollout_is_threshold is not None or Correction.of(algorithm.rollout_correction).is_on
    if is_corrected and not present:
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
