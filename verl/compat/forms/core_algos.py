"""The same mathematics under the names and signatures of upstream's `core_algos`, which users' code calls.

There the denominators travel as loose numbers and metrics are floats under their full names; here they are `LossNorm`
and `Metric`. Nothing in the library calls these forms.
"""
# ruff: noqa: F401

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from verl.algorithms import aggregation, kl, value_loss
from verl.algorithms.advantages import (
    AdvantageEstimator,
    AdvantageFn,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
)
from verl.algorithms.advantages.gae import gae as compute_gae_advantage_return
from verl.algorithms.advantages.gdpo import gdpo as compute_gdpo_outcome_advantage
from verl.algorithms.advantages.gpg import gpg as compute_gpg_outcome_advantage
from verl.algorithms.advantages.grpo import grpo as compute_grpo_outcome_advantage
from verl.algorithms.advantages.grpo_passk import grpo_passk as compute_grpo_passk_outcome_advantage
from verl.algorithms.advantages.opo import opo as compute_opo_outcome_advantage
from verl.algorithms.advantages.optimal_token_baseline import (
    optimal_token_baseline,
)
from verl.algorithms.advantages.optimal_token_baseline import (
    tir_optimal_token_baseline as compute_multi_turn_optimal_token_baseline_advantage,
)
from verl.algorithms.advantages.remax import remax as compute_remax_outcome_advantage
from verl.algorithms.advantages.rloo import rloo as compute_rloo_outcome_advantage
from verl.algorithms.aggregation import LossNorm, loss_norm
from verl.algorithms.groups import Groups
from verl.algorithms.kl import AdaptiveKLController, FixedKLController, get_kl_controller
from verl.algorithms.logprob import entropy_from_logits
from verl.algorithms.policy_losses import PolicyLossFn
from verl.algorithms.policy_losses.vanilla import vanilla
from verl.algorithms.reweighting import resampled_rows
from verl.registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES, EstimatorFacts, LossFacts

compute_grpo_vectorized_outcome_advantage = compute_grpo_outcome_advantage
compute_rloo_vectorized_outcome_advantage = compute_rloo_outcome_advantage
compute_reinforce_plus_plus_outcome_advantage = reinforce_plus_plus.reinforce_plus_plus
compute_reinforce_plus_plus_baseline_outcome_advantage = reinforce_plus_plus_baseline.reinforce_plus_plus_baseline


def register_adv_est(name_or_enum: str, facts: EstimatorFacts | None = None) -> Callable[[AdvantageFn], AdvantageFn]:
    """Decorator: make an estimator known under a name for ``algorithm.adv_estimator``; ``facts`` say what it needs."""
    return ADVANTAGE_ESTIMATORS.register(name_or_enum, facts)


def get_adv_estimator_fn(name_or_enum: str) -> AdvantageFn:
    """The estimator of that name or dotted path."""
    return ADVANTAGE_ESTIMATORS.get(name_or_enum)


def register_policy_loss(name: str, facts: LossFacts | None = None) -> Callable[[PolicyLossFn], PolicyLossFn]:
    """Decorator: make a policy loss known under a name for ``actor.policy_loss.loss_mode``; ``facts`` as above."""
    return POLICY_LOSSES.register(name, facts)


def get_policy_loss_fn(name: str) -> PolicyLossFn:
    """The policy loss of that name or dotted path."""
    return POLICY_LOSSES.get(name)


ADV_ESTIMATOR_REGISTRY = ADVANTAGE_ESTIMATORS.table()
POLICY_LOSS_REGISTRY = POLICY_LOSSES.table()


def group_ids(index: Sequence[Hashable] | Tensor, device: str | torch.device | None = None) -> Tensor:
    """(B,) int64, the number of each row's group; groups are numbered as they come."""
    return Groups.of(index, torch.ones(len(index), dtype=torch.bool, device=device)).ids


def group_mean_std(
    scores: Tensor, gidx: Tensor, eps: float = 1e-6, device: str | torch.device | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Of each group (G,): the mean, the sample standard deviation and the number of its rows.

    A group of one has mean 0 and deviation 1, which leaves its score as it is. ``eps`` is the smallest variance.
    """
    scores, gidx = scores.to(device), gidx.to(device)
    count = torch.bincount(gidx).to(scores)
    mean = torch.zeros_like(count).index_add_(0, gidx, scores) / count
    squares = torch.zeros_like(count).index_add_(0, gidx, (scores - mean[gidx]) ** 2)
    alone = count == 1
    std = (squares / (count - 1).clamp(min=1)).clamp(min=eps).sqrt()
    return mean.masked_fill(alone, 0.0), std.masked_fill(alone, 1.0), count


def compute_optimal_token_baseline_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Sequence[Hashable],
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None = None,
    handle_zero_tail: bool = True,
    epsilon: float = 1e-8,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """`optimal_token_baseline`, which handles the tail of the longest response by default here."""
    return optimal_token_baseline(
        token_level_rewards,
        response_mask,
        index,
        old_log_probs,
        sum_pi_squared,
        rollout_is_weights,
        handle_zero_tail,
        epsilon,
        **kwargs,
    )


def compute_pf_ppo_reweight_data(data: Any, reweight_method: str = "pow", weight_pow: float = 2.0) -> Any:
    """A `DataProto` of as many rows, drawn by their ``token_level_scores`` (see `reweighting`)."""
    return data.select_idxs(resampled_rows(data.batch["token_level_scores"].sum(-1), reweight_method, weight_pow))


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    dp_size: int = 1,
    batch_num_tokens: float | None = None,
    global_batch_size: float | None = None,
    loss_scale_factor: float | None = None,
) -> Tensor:
    """`aggregation.agg_loss`; without numbers, normalised by the running optimizer step if there is one."""
    norm = _norm(loss_mask, dp_size, batch_num_tokens, global_batch_size, loss_scale_factor)
    return aggregation.agg_loss(loss_mat, loss_mask, loss_agg_mode, norm)


def compute_value_loss(
    vpreds: Tensor,
    returns: Tensor,
    values: Tensor,
    response_mask: Tensor,
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
    dp_size: int = 1,
    batch_num_tokens: float | None = None,
    global_batch_size: float | None = None,
    loss_scale_factor: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`value_loss.value_loss`: the loss and the clipped share."""
    norm = _norm(response_mask, dp_size, batch_num_tokens, global_batch_size, loss_scale_factor)
    return value_loss.value_loss(vpreds, returns, values, response_mask, cliprange_value, loss_agg_mode, norm)


PolicyLossForm = Callable[..., tuple[Tensor, dict[str, float]]]


def _policy_loss(name: str, default_mode: str = "token-mean") -> PolicyLossForm:
    """The built-in loss of that name, with metrics as floats under ``actor/...``."""

    def form(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = default_mode,
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        loss, metrics = POLICY_LOSSES.get(name)(
            old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights
        )
        return loss, {f"actor/{key}": metric.value for key, metric in metrics.items()}

    form.__name__ = form.__qualname__ = f"compute_policy_loss_{name}"
    form.__doc__ = f"The policy loss {name!r}: the loss, and metrics as floats under ``actor/...``."
    return form


compute_policy_loss_vanilla = _policy_loss("vanilla")
compute_policy_loss_dppo_tv = _policy_loss("dppo_tv")
compute_policy_loss_dppo_kl = _policy_loss("dppo_kl")
compute_policy_loss_gspo = _policy_loss("gspo", "seq-mean-token-mean")
compute_policy_loss_sapo = _policy_loss("sapo", "seq-mean-token-mean")
compute_policy_loss_gpg = _policy_loss("gpg")
compute_policy_loss_clip_cov = _policy_loss("clip_cov")
compute_policy_loss_kl_cov = _policy_loss("kl_cov")
compute_policy_loss_geo_mean = _policy_loss("geo_mean")
compute_policy_loss_cispo = _policy_loss("cispo")
compute_policy_loss_dro = _policy_loss("dro")
compute_policy_loss_bypass_mode = _policy_loss("bypass_mode")


def compute_policy_loss_reinforce(
    rollout_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-sum",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """The policy loss ``reinforce``, whose old log-probs (for ``ppo_kl`` only) are the sampler's."""
    return _policy_loss("reinforce")(
        rollout_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights
    )


def compute_policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    cliprange: float | None = None,
    cliprange_low: float | None = None,
    cliprange_high: float | None = None,
    clip_ratio_c: float = 3.0,
    loss_agg_mode: str = "token-mean",
) -> tuple[Tensor, float, float, float]:
    """The older form: loss, ``pg_clipfrac``, ``ppo_kl``, ``pg_clipfrac_lower``."""
    clip = SimpleNamespace(
        clip_ratio=0.2 if cliprange is None else cliprange,
        clip_ratio_low=cliprange_low,
        clip_ratio_high=cliprange_high,
        clip_ratio_c=clip_ratio_c,
    )
    loss, metrics = vanilla(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, clip)
    return loss, metrics["pg_clipfrac"].value, metrics["ppo_kl"].value, metrics["pg_clipfrac_lower"].value


def compute_entropy_loss(logits: Tensor, response_mask: Tensor, loss_agg_mode: str = "token-mean") -> Tensor:
    """The aggregated entropy of logits (b, T, V)."""
    return aggregation.agg_loss(entropy_from_logits(logits), response_mask, loss_agg_mode)


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """`kl.kl_penalty`, with the parameter under upstream's name."""
    return kl.kl_penalty(logprob, ref_logprob, kl_penalty)


def kl_penalty_forward(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """The estimator alone: a ``+`` at the end of the name is left out, and with it the gradient of k2."""
    return kl.kl_penalty(logprob, ref_logprob, kl_penalty.removesuffix("+"))


def _norm(
    mask: Tensor, dp_size: int, tokens: float | None, sequences: float | None, scale: float | None
) -> LossNorm | None:
    """None where no number was given, so that the running norm applies; what is missing is counted from the mask."""
    if dp_size == 1 and tokens is None and sequences is None and scale is None:
        return None
    here = aggregation.running_norm() or loss_norm(mask)
    numbers = {"num_tokens": tokens, "num_sequences": sequences, "loss_scale_factor": scale}
    changes: dict[str, Any] = {name: float(x) for name, x in numbers.items() if x is not None}
    return replace(here, dp_size=dp_size, **changes)
