"""Self-play preference optimization: how much better an answer is than the policy, and the loss that learns it.

The paper (Wu et al., arXiv 2405.00675) asks a preference model how often an answer y beats the policy pi_t that sampled
it, and moves the log-ratio of y towards that::

    (log pi(y) - log pi_t(y) - eta (P(y beats pi_t) - 1/2))^2

With scores r instead of preferences, P - 1/2 is the score minus the soft mean of the policy's scores::

    r - softmean(r),        softmean(r) = (1 / beta) log mean exp(beta r),        beta = 1

The soft mean lies above the mean where scores differ: answers of middling score become less likely.
Shapes: B rows, T response tokens.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from verl.algorithms.aggregation import LossNorm, agg_loss
from verl.algorithms.groups import Groups, outcome_scores, settle_singletons, spread_over_tokens
from verl.algorithms.masked import masked_sum
from verl.metrics import Metric

BETA = 1.0


def softmean(scores: Tensor, groups: Groups, beta: float = BETA) -> Tensor:
    """(B,) -> (B,) float64: the soft mean of each row's group, safe for scores of any size."""
    scaled = beta * scores.double()
    largest = groups.max(scaled, groups.counted)
    return (largest + (groups.sum((scaled - largest).exp()) / groups.size()).log()) / beta


@torch.no_grad()
def centred(
    token_level_rewards: Tensor, response_mask: Tensor, index: Sequence[Hashable], **_: Any
) -> tuple[Tensor, Tensor]:
    """The score minus the soft mean of the answers to the same prompt; one answer alone has nothing to learn from.

    Returns:
        advantages and returns, which are the same here: (B, T).
    """
    scores = outcome_scores(token_level_rewards, response_mask)
    groups = Groups.of(index, scores.isfinite())
    advantage = settle_singletons(scores - softmean(scores, groups), scores, groups, "zero")
    advantages = spread_over_tokens(advantage, response_mask, token_level_rewards.dtype)
    return advantages, advantages


@torch.no_grad()
def centred_over_batch(token_level_rewards: Tensor, response_mask: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    """As `centred`, with one soft mean of the whole batch: for one answer per prompt.

    Prompts differ in difficulty, which this takes for a difference between answers.
    """
    return centred(token_level_rewards, response_mask, index=[0] * len(response_mask))


def sppo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: Any,
    rollout_is_weights: Tensor | None,
    norm: LossNorm,
) -> tuple[Tensor, dict[str, Metric]]:
    """The square above, of each row::

        x_i = (sum_t (log pi - log pi_old) - eta A_i)^2

    Every valid token of a row carries its x_i, so that ``loss_agg_mode=seq-mean-token-mean`` is the mean over the rows
    that have a token. Importance weights of the rollout multiply the terms of the tokens.

    Metrics: ``ppo_kl``, the mean of -log-ratio over tokens; ``sppo_log_ratio``, the mean log-ratio of a row;
    ``sppo_error``, its mean distance from the target.
    """
    mask = response_mask.bool()
    num_rows, num_tokens = float(mask.any(-1).sum()), float(mask.sum())
    log_ratio = masked_sum(log_prob - old_log_prob, mask, axis=-1)
    advantage = masked_sum(advantages, mask, axis=-1) / mask.sum(-1).clamp(min=1)
    error = log_ratio - config.sppo_eta * advantage
    terms = error.square()[:, None].expand_as(mask)
    if rollout_is_weights is not None:
        terms = terms * rollout_is_weights
    total, distance = log_ratio.detach().sum().item(), error.detach().abs().sum().item()
    metrics = {
        "ppo_kl": Metric(-total / max(num_tokens, 1.0), "mean", num_tokens),
        "sppo_log_ratio": Metric(total / max(num_rows, 1.0), "mean", num_rows),
        "sppo_error": Metric(distance / max(num_rows, 1.0), "mean", num_rows),
    }
    return agg_loss(terms, mask, loss_agg_mode, norm), metrics
