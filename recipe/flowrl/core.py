"""FlowRL: the policy matches the reference times the exponential reward, by a squared trajectory balance.

Zhu et al. 2025 (arXiv 2509.15207). For an answer y to a prompt x, with l its tokens, r the reward, normalised among the
answers to x, and Z(x) a number for each prompt::

    L          = w (log Z(x) + [log pi(y) - log ref(y)] / l - beta r)^2
    L = 0      where pi(y)^(1 / l) = ref(y)^(1 / l) exp(beta r) / Z(x)
    w          = clip(pi(y) / pi_old(y), 1 - low, 1 + high), without gradient

The paper learns log Z(x) by a small network on the prompt's hidden states. Here it is what that network would learn
from the answers of this step alone, the mean of ``beta r - [log pi_old(y) - log ref(y)] / l`` over the answers to x
(`group_partition`), or the value of a critic that learns it in all steps (`learned_partition`). Both are there before
the update, so that ``beta r - log Z(x)`` is an answer's advantage.

Shapes: B rows, b rows of a micro-batch, T response tokens.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from recipe.flowrl import FlowConfig
from verl.algorithms.aggregation import LossNorm, agg_loss
from verl.algorithms.groups import Groups, lengths_of, outcome_scores, spread_over_tokens
from verl.algorithms.masked import masked_sum, zero_outside
from verl.algorithms.policy_losses.clip import Clip
from verl.config.schema.actor import ActorConfig
from verl.metrics import Metric

EPSILON = 1e-6
"""Added to the standard deviation of a group's rewards."""
UNSCORED = -torch.inf
"""The advantage of an answer without a score. 0 would pull it to the reference; NaN means numbers that went wrong."""
MODE = "seq-mean-token-mean"


@torch.no_grad()
def group_partition(
    token_level_rewards: Tensor,
    old_log_probs: Tensor,
    ref_log_prob: Tensor,
    response_mask: Tensor,
    index: Sequence[Hashable],
    config: FlowConfig,
    **_: object,
) -> tuple[Tensor, Tensor]:
    """``beta r - log Z(x)`` of each answer, with log Z(x) the mean over the answers to the prompt.

    An answer without a score gets `UNSCORED`; one alone with its prompt is in balance where it was drawn.

    Args:
        token_level_rewards, old_log_probs, ref_log_prob, response_mask: (B, T).
        index: (B,) prompt id of each row.
        config: the section ``algorithm``, with ``flowrl_beta``.

    Returns:
        advantages and returns, which are the same: (B, T).
    """
    pull, drift, groups = _parts(token_level_rewards, old_log_probs, ref_log_prob, response_mask, index, config)
    log_partition = groups.sum(pull - drift) / groups.size().clamp(min=1)
    advantage = torch.where(groups.counted, pull - log_partition, UNSCORED)
    advantages = spread_over_tokens(advantage, response_mask, token_level_rewards.dtype)
    return advantages, advantages


@torch.no_grad()
def learned_partition(
    token_level_rewards: Tensor,
    old_log_probs: Tensor,
    ref_log_prob: Tensor,
    values: Tensor,
    response_mask: Tensor,
    index: Sequence[Hashable],
    config: FlowConfig,
    **_: object,
) -> tuple[Tensor, Tensor]:
    """As `group_partition`, with log Z(x) the critic's value before the first token of the answer.

    Args:
        values: (B, T); those after the first valid token have seen parts of the answer, and are not read.

    Returns:
        advantages, and the targets of log Z as returns of every token: (B, T). The returns of an answer without a
        score are the values, from which the critic learns nothing.
    """
    pull, drift, groups = _parts(token_level_rewards, old_log_probs, ref_log_prob, response_mask, index, config)
    first = response_mask.bool().int().argmax(-1, keepdim=True)
    log_partition = values.double().gather(-1, first)[:, 0]
    advantage = torch.where(groups.counted, pull - log_partition, UNSCORED)
    targets = torch.where(groups.counted[:, None], (pull - drift)[:, None], values.double())
    dtype = token_level_rewards.dtype
    return spread_over_tokens(advantage, response_mask, dtype), zero_outside(targets.to(values.dtype), response_mask)


def _parts(
    token_level_rewards: Tensor,
    old_log_probs: Tensor,
    ref_log_prob: Tensor,
    response_mask: Tensor,
    index: Sequence[Hashable],
    config: FlowConfig,
) -> tuple[Tensor, Tensor, Groups]:
    """(B,) float64 ``beta r`` and ``[log pi_old(y) - log ref(y)] / l``; the groups of rows with a score."""
    scores = outcome_scores(token_level_rewards, response_mask)
    groups = Groups.of(index, scores.isfinite())
    centred = groups.centre(scores)
    drift = zero_outside(old_log_probs - ref_log_prob, response_mask).double().sum(-1)
    pull = config.flowrl_beta * centred / (groups.std(centred) + EPSILON)
    return pull, drift / lengths_of(response_mask).clamp(min=1), groups


def flow_balance(
    old_log_prob: Tensor,
    log_prob: Tensor,
    ref_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    config: ActorConfig,
    norm: LossNorm,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Metric]]:
    """The mean of L over the rows of the mini-batch that have a token, whatever ``loss_agg_mode`` says.

    A row whose advantages are `UNSCORED` has no term and no gradient.

    Importance weights of the rollout multiply the terms of the tokens, all of which are their row's L.

    Args:
        old_log_prob, log_prob, ref_log_prob, advantages, response_mask: (b, T); an advantage is ``beta r - log Z(x)``.
        config: the section ``actor_rollout_ref.actor``; ``clip_ratio_low`` and ``clip_ratio_high`` bound w.

    Metrics: ``ppo_kl``, the mean of -log-ratio over tokens; ``flowrl_gap``, the mean distance from balance;
    ``flowrl_weight``, the mean of w.
    """
    mask, clip = response_mask.bool() & (advantages != UNSCORED), Clip.of(config)
    lengths = mask.sum(-1).clamp(min=1)
    log_ratio = masked_sum(log_prob - old_log_prob, mask, axis=-1).detach()
    weight = log_ratio.exp().clamp(1 - clip.low, 1 + clip.high)
    gap = masked_sum(log_prob - ref_log_prob - advantages, mask, axis=-1) / lengths
    terms = (weight * gap.square())[:, None].expand_as(mask)
    if rollout_is_weights is not None:
        terms = terms * rollout_is_weights
    rows, tokens = mask.any(-1), float(mask.sum())
    number = float(rows.sum())
    metrics = {
        "ppo_kl": Metric(-log_ratio.sum().item() / max(tokens, 1.0), "mean", tokens),
        "flowrl_gap": Metric(gap.detach().abs()[rows].sum().item() / max(number, 1.0), "mean", number),
        "flowrl_weight": Metric(weight[rows].sum().item() / max(number, 1.0), "mean", number),
    }
    return agg_loss(terms, mask, MODE, norm), metrics


vars(flow_balance)["forced_agg_mode"] = MODE
