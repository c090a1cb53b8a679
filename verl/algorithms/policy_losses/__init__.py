"""Policy losses, one file each, and the one place that calls them.

A policy loss is any function ``(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config,
rollout_is_weights) -> (loss, metrics)``; a built-in one also takes ``norm``. One that names ``ref_log_prob`` gets the
reference's log-probs. It is found by name in `verl.registry.POLICY_LOSSES`, or by a dotted path in
``actor_rollout_ref.actor.policy_loss.loss_mode``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from verl.algorithms.aggregation import LossNorm, normalised_by
from verl.algorithms.calls import accepted_inputs, check_shapes, function_place, names_parameter
from verl.algorithms.masked import zero_outside
from verl.config.schema.actor import ActorConfig
from verl.errors import ConfigError
from verl.metrics import Metric, as_float, notice

PolicyLossFn = Callable[..., tuple[Tensor, Mapping[str, Any]]]
OLD_METRICS = ("pg_clipfrac", "ppo_kl", "pg_clipfrac_lower")


def call_policy_loss(
    policy_loss: PolicyLossFn,
    *,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: ActorConfig | None,
    norm: LossNorm,
    rollout_is_weights: Tensor | None = None,
    ref_log_prob: Tensor | None = None,
) -> tuple[Tensor, dict[str, Metric]]:
    """Call a policy loss so that its result is normalised over the mini-batch; also a user's loss.

    A function without a ``norm`` parameter is normalised through `verl.trainer.ppo.core_algos.agg_loss`. If it calls
    neither, its result is taken for a mean over the tokens of the micro-batch and weighted by their share.

    Args:
        old_log_prob, log_prob, advantages, response_mask, rollout_is_weights, ref_log_prob: (b, T).

    Returns:
        The loss, and its metrics without the prefix ``actor/``.

    Raises:
        ValueError: tensors of different shapes.
    """
    tensors = {"old_log_prob": old_log_prob, "log_prob": log_prob, "advantages": advantages}
    check_shapes({**tensors, "response_mask": response_mask})
    # Padding is cleared first, because a user's ``(x * mask).sum()`` would let a NaN through.
    weights = None if rollout_is_weights is None else zero_outside(rollout_is_weights, response_mask)
    inputs = {name: zero_outside(tensor, response_mask) for name, tensor in tensors.items()} | {
        "response_mask": response_mask,
        "loss_agg_mode": loss_agg_mode,
        "config": config,
        "rollout_is_weights": weights,
    }
    if ref_log_prob is not None:
        inputs["ref_log_prob"] = zero_outside(ref_log_prob, response_mask)
    takes_norm = names_parameter(policy_loss, "norm")
    arguments = accepted_inputs(policy_loss, inputs | {"norm": norm} if takes_norm else inputs)
    with normalised_by(norm) as running:
        loss, metrics = _unpack(policy_loss, policy_loss(**arguments))
    num_tokens = float(response_mask.bool().sum())
    if not takes_norm and not running.used:
        notice(
            "actor_rollout_ref.actor.policy_loss.loss_mode",
            f"{function_place(policy_loss)} calls neither agg_loss nor takes a norm: "
            "its loss is weighted as a token mean",
        )
        loss = loss * (norm.dp_size * num_tokens / (norm.num_tokens or 1.0))
    return loss, {name.removeprefix("actor/"): _as_metric(value, num_tokens) for name, value in metrics.items()}


def aggregation_of(policy_loss: PolicyLossFn, configured: str) -> str:
    """The mode by which a loss is aggregated: the configured one, unless another belongs to the loss."""
    return getattr(policy_loss, "forced_agg_mode", None) or configured


def _unpack(policy_loss: PolicyLossFn, result: Any) -> tuple[Tensor, Mapping[str, Any]]:
    """Today's pair (loss, metrics), or the older (loss, clipfrac, kl, clipfrac_lower)."""
    returned = result if isinstance(result, (tuple, list)) else [result]
    if isinstance(result, Tensor):
        result = (result, {})
    parts = tuple(result) if isinstance(result, (tuple, list)) else ()
    if len(parts) == 1 + len(OLD_METRICS):
        parts = (parts[0], dict(zip(OLD_METRICS, parts[1:])))
    if len(parts) == 2 and isinstance(parts[0], Tensor) and parts[0].dim() == 0 and isinstance(parts[1], Mapping):
        return parts
    raise ConfigError(
        f"the policy loss {function_place(policy_loss)} returned something else than a loss and its metrics",
        key="actor_rollout_ref.actor.policy_loss.loss_mode",
        got=[_shape_of(part) for part in returned] or type(result).__name__,
        allowed="(scalar tensor, dict of metrics)",
        fix=_repair(parts),
    )


def _shape_of(part: Any) -> str:
    return f"a tensor of shape {tuple(part.shape)}" if isinstance(part, Tensor) else type(part).__name__


def _repair(parts: tuple[Any, ...]) -> str:
    """How a result becomes a pair of a scalar and its metrics."""
    if parts and isinstance(parts[0], Tensor) and parts[0].dim() > 0:
        return (
            "Make one number of the tokens' losses: agg_loss(loss_mat=losses, loss_mask=response_mask, "
            "loss_agg_mode=loss_agg_mode), of verl.trainer.ppo.core_algos."
        )
    if len(parts) > 1 and isinstance(parts[0], Tensor):
        return 'End it with: return loss, {"my_metric": number}.'
    return "End it with: return loss, {}."


def _as_metric(value: Any, num_tokens: float) -> Metric:
    return value if isinstance(value, Metric) else Metric(as_float(value), "mean", num_tokens)
