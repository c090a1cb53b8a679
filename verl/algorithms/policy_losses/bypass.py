"""The loss where the sampler's log-probs stand in for the old ones, so that two policies are left instead of three."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from verl.algorithms.aggregation import LossNorm
from verl.algorithms.policy_losses.reinforce import reinforce
from verl.algorithms.policy_losses.vanilla import vanilla
from verl.algorithms.rollout_correction import Correction, correction_of
from verl.config.schema.actor import ActorConfig
from verl.config.schema.algorithm import RolloutCorrectionConfig
from verl.errors import ConfigError, EngineError
from verl.metrics import Metric

LOSS_TYPES = {"ppo_clip": vanilla, "reinforce": reinforce}
NO_CORRECTION = {
    "rollout_is": None,
    "rollout_is_threshold": 2.0,
    "rollout_is_batch_normalize": False,
    "rollout_rs": None,
    "rollout_rs_threshold": None,
    "bypass_mode": True,
    "loss_type": "ppo_clip",
}


def bypass_mode(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str | None = None,
    config: ActorConfig | None = None,
    rollout_is_weights: Tensor | None = None,
    norm: LossNorm | None = None,
) -> tuple[Tensor, dict[str, Metric]]:
    """Correct for the sampler inside the loss, from the present policy over the sampler's.

    ``loss_type`` of ``policy_loss.rollout_correction`` (which follows ``algorithm.rollout_correction``)::

        ppo_clip   `vanilla` on the ratio pi / mu: the clip is the correction, and no weights come on top of it
        reinforce  `reinforce` with w = min(pi / mu, threshold), constant, recomputed for every micro-batch

    With ``rollout_is_batch_normalize`` the weights of `reinforce` are divided by their mean over the mini-batch, all of
    its micro-batches and ranks (``norm.mean_weight``, measured before the first backward pass).

    Rejected tokens and sequences cost nothing; the denominators stay those of the whole mini-batch, because rejection
    depends on the present policy and they are counted before it runs.

    Args:
        old_log_prob: (b, T) the sampler's log-probs.
        rollout_is_weights: not used: weights against this same policy would count twice.

    Returns:
        The loss and its metrics, those of the correction under ``rollout_corr/``.
    """
    settings = correction_settings(config)
    if settings.loss_type not in LOSS_TYPES:
        raise ConfigError(
            "unknown loss of the bypass mode",
            key="algorithm.rollout_correction.loss_type",
            got=settings.loss_type,
            allowed=sorted(LOSS_TYPES),
        )
    loss_fn, how = LOSS_TYPES[settings.loss_type], Correction.of(settings)
    mean = None if norm is None else norm.mean_weight
    if norm is not None and mean is None and normalises(settings):
        raise EngineError(
            "the weights are divided by their mean over the mini-batch, which the engine did not measure",
            key="algorithm.rollout_correction.rollout_is_batch_normalize",
            fix="Let the engine's train_batch set LossNorm.mean_weight (see verl.algorithms.losses.mean_weight).",
        )
    corrected = correction_of(log_prob.detach(), old_log_prob, response_mask, how, mean)
    weights = corrected.weights if loss_fn is reinforce else None
    loss, metrics = loss_fn(old_log_prob, log_prob, advantages, corrected.mask, loss_agg_mode, config, weights, norm)
    num_tokens = metrics["ppo_kl"].weight
    return loss, metrics | {
        f"rollout_corr/{name}": Metric(value, "mean", num_tokens) for name, value in corrected.metrics.items()
    }


def normalises(settings: RolloutCorrectionConfig | SimpleNamespace) -> bool:
    """Whether the loss of the bypass mode divides its weights by their mean over the mini-batch."""
    makes_weights = settings.loss_type == "reinforce" and settings.rollout_is is not None
    return bool(settings.bypass_mode and settings.rollout_is_batch_normalize and makes_weights)


def correction_settings(config: ActorConfig | None) -> Any:
    """The correction's settings in an actor's configuration; a plain mapping is filled up with defaults."""
    settings = None if config is None else config.policy_loss.rollout_correction
    if settings is None or isinstance(settings, Mapping):
        return SimpleNamespace(**{**NO_CORRECTION, **(settings or {})})
    return settings
