"""The sampler's log-probs and the trainer's: how far apart they are, and what makes up for it.

The rollout correction comes once per batch, on the controller, before advantages are estimated. Both forms of the
configuration end here: ``algorithm.rollout_is_*`` (metrics ``mismatch/``) and ``algorithm.rollout_correction.*``
(metrics ``rollout_corr/``). The mathematics is in `verl.algorithms.rollout_correction`. After each weight sync to a
sampler with rounded weights a few tokens are compared. Shapes: B rows, T response tokens.
"""

from __future__ import annotations

import math

import torch

from verl.algorithms.rollout_correction import Correction, CorrectionResult, correction_of, importance_sampling_of
from verl.algorithms.rollout_correction.mismatch import probability_difference
from verl.config import AlgoConfig
from verl.config.schema.algorithm import importance_sampling
from verl.errors import DataError, RolloutError
from verl.protocol import DataProto
from verl.single_controller.base import collected
from verl.trainer.ppo.context import StepContext
from verl.workers.options import InferOptions
from verl.workers.roles import Roles
from verl.workers.sampling import SamplingWorker

TOLERANCE = "actor_rollout_ref.rollout.quantization_tolerance"
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
    if corrected.weights is not None and (algorithm.rollout_is or algorithm.rollout_is_threshold is None):
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


def measure_sampler(batch: DataProto, ctx: StepContext) -> None:
    """How far the sampler's log-probs are from the recomputed ones, where there are both."""
    if "rollout_log_probs" in batch.tensors.keys():
        for name, value in rollout_difference(batch).items():
            ctx.metrics.add(name, value, "last")


def rollout_difference(batch: DataProto) -> dict[str, float]:
    """How far the sampler's probabilities are from the trainer's, over sampled tokens."""
    columns = ("old_log_probs", "rollout_log_probs", "response_mask")
    return probability_difference(*(batch.tensors[name] for name in columns))


def check_reloaded(roles: Roles, ctx: StepContext, version: int) -> None:
    """Compare what every replica reports of a few tokens that it draws with what the trainer computes for them.

    Rounding moves every log-prob a little. A scale that is wrong, or a layer that kept old weights, moves them further,
    and nothing else would say so: the samples would only be those of another policy.

    Raises:
        RolloutError: a replica is further away than ``rollout.quantization_tolerance``.
    """
    rollout = ctx.config.actor_rollout_ref.rollout
    if rollout.quantization is None:
        return
    with ctx.timed("check_weights"):
        drawn = collected(roles["rollout"].group, SamplingWorker.probe)(version)
        ctx.metrics.merge(drawn.meta_info.pop("metrics"))
        made = roles["actor"].infer(drawn, InferOptions())
        compare_reloaded(drawn, made, rollout.quantization_tolerance, ctx)


def compare_reloaded(drawn: DataProto, made: DataProto, most: float, ctx: StepContext) -> None:
    """Report the mean difference of the replica that is furthest away, in nats, and the largest of all.

    Args:
        drawn: rollout_log_probs and response_mask (B, T), and the column ``replica``.
        made: log_probs (B, T), the trainer's.
        most: bound of that mean.
    """
    differences = (made.tensors["log_probs"] - drawn.tensors["rollout_log_probs"]).abs()
    mask, names = drawn.tensors["response_mask"].bool(), drawn.non_tensor_batch["replica"]
    rows_of = {name: mask & torch.from_numpy(names == name)[:, None] for name in dict.fromkeys(names)}
    means = {name: differences[rows].mean().item() for name, rows in rows_of.items()}
    furthest = max(means, key=lambda name: math.inf if math.isnan(means[name]) else means[name])
    ctx.metrics.add("training/reload_log_probs_diff_mean", means[furthest], "last")
    ctx.metrics.add("training/reload_log_probs_diff_max", differences[mask].max().item(), "last")
    if not means[furthest] <= most:
        raise RolloutError(
            f"with the weights of step {ctx.step}, log-probs of {furthest} are {means[furthest]:.3g} away from the "
            f"trainer's, on average over {int(mask.sum())} tokens: a scale or a layer of the sampler is wrong, or this "
            "model cannot be rounded so coarsely",
            key=TOLERANCE,
            got=round(means[furthest], 6),
            allowed=f"at most {most}",
            fix="Set actor_rollout_ref.rollout.quantization=null to see whether rounding is the cause; raise the "
            "tolerance if it is, and the rollout correction makes up for it.",
        )
