"""Online DPO and XPO as losses on two answers of the policy, Nash-MD as the advantage of an answer.

With sums over the tokens of an answer, y_w the better of two answers to a prompt, y_l the worse one::

    online DPO (Guo et al. 2024, arXiv 2402.04792):  L = -log s(beta h)
        h = [log pi(y_w) - log ref(y_w)] - [log pi(y_l) - log ref(y_l)]
    XPO (Xie et al. 2024, arXiv 2405.21046, algorithm 1):  L + alpha E_{y ~ ref} log pi(y)
    Nash-MD (Munos et al. 2023, arXiv 2312.00886, section 7), gradient of y ~ pi:
        [P(y beats y') - 1/2 - tau log(pi(y) / ref(y))] grad log pi(y),   y' ~ pi^(1-m) ref^m, normalised

XPO draws y from the reference, Nash-MD draws y' from the mixture. Here the policy draws all answers, and those
expectations are importance-weighted means over the answers to a prompt, self-normalised: weights proportional to
ref / pi, and to (ref / pi)^m, with pi the policy that drew. They are consistent in the number of answers; with few of
them they are biased towards the policy, the more the further it is from the reference.

Shapes: b = 2 m rows of pairs, or B rows of samples; T response tokens.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from recipe.online_dpo import NashConfig, OnlineActorConfig
from recipe.spin.core import dpo_of_pairs, rows_of_pairs
from verl.algorithms.aggregation import LossNorm
from verl.algorithms.groups import Groups, outcome_scores, settle_singletons, spread_over_tokens
from verl.algorithms.preference import answer_sums, over_pairs, pair_mean
from verl.metrics import Metric


def online_dpo(
    log_prob: Tensor, ref_log_prob: Tensor, response_mask: Tensor, config: OnlineActorConfig, norm: LossNorm
) -> tuple[Tensor, dict[str, Metric]]:
    """The mean of L over the pairs of the mini-batch, whose rows are those of `recipe.spin.core.dpo`.

    Args:
        log_prob, ref_log_prob, response_mask: (b, T).
        config: the section ``actor_rollout_ref.actor``, with ``online_beta``.

    Metrics: those of `verl.algorithms.preference.DPOLoss`.
    """
    return dpo_of_pairs(log_prob, ref_log_prob, response_mask, config.online_beta, norm)


def xpo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    ref_log_prob: Tensor,
    response_mask: Tensor,
    config: OnlineActorConfig,
    norm: LossNorm,
) -> tuple[Tensor, dict[str, Metric]]:
    """`online_dpo` and alpha times the mean log-probability of the reference's answers.

    Other than in algorithm 1, prompts whose two answers tie have no pair, and count in neither mean.

    Args:
        old_log_prob: (b, T), of the policy that drew the answers; gives the weights, without gradient.
        config: also has ``xpo_alpha``.

    Metrics: also ``xpo_bonus``, the mean log-probability, and ``xpo_largest_weight``: at 1 one answer of each pair
    stands for the reference, and the estimate of its mean is poor.
    """
    loss, metrics = online_dpo(log_prob, ref_log_prob, response_mask, config, norm)
    rows = rows_of_pairs(response_mask)
    if not len(rows):
        return loss, metrics
    mask = response_mask[rows]
    policy, old, reference = (answer_sums(x[rows], mask).view(-1, 2) for x in (log_prob, old_log_prob, ref_log_prob))
    weights = (reference - old).detach().softmax(-1)
    bonus = (weights * policy).sum(-1)
    measured = {"xpo_bonus": bonus, "xpo_largest_weight": weights.max(-1).values}
    loss = loss + config.xpo_alpha * over_pairs(bonus, norm)
    return loss, metrics | {name: pair_mean(values) for name, values in measured.items()}


@torch.no_grad()
def nash_md(
    token_level_rewards: Tensor,
    token_level_scores: Tensor,
    old_log_probs: Tensor,
    ref_log_prob: Tensor,
    response_mask: Tensor,
    index: Sequence[Hashable],
    config: NashConfig,
    **_: object,
) -> tuple[Tensor, Tensor]:
    """P(y beats the mixture) - 1/2 - tau log(pi(y) / ref(y)) of each answer.

    P is the weighted mean of s((score - score') / nash_scale) over the other answers to the prompt. The term of tau is
    the KL that ``algorithm.kl_ctrl.kl_coef`` has charged to the rewards. An answer without others has no preference.

    Args:
        token_level_rewards, token_level_scores: (B, T), with and without the KL.
        old_log_probs, ref_log_prob: (B, T), of the policy that drew the answers, and of the reference.
        config: the section ``algorithm``, with ``nash_mixture`` and ``nash_scale``.

    Returns:
        advantages and returns, which are the same: (B, T).
    """
    scores = outcome_scores(token_level_scores, response_mask)
    charged = outcome_scores(token_level_rewards, response_mask) - scores
    log_ratio = answer_sums(ref_log_prob.double() - old_log_probs.double(), response_mask)
    groups = Groups.of(index, scores.isfinite() & charged.isfinite())
    preference = torch.zeros_like(scores)
    order = torch.where(groups.counted, groups.ids, groups.num_groups)
    for rows in torch.argsort(order, stable=True).split(torch.bincount(order).tolist()):
        if len(rows) < 2 or order[rows[0]] == groups.num_groups:
            continue
        among = (config.nash_mixture * log_ratio[rows]).expand(len(rows), -1)
        weights = among.masked_fill(torch.eye(len(rows), dtype=torch.bool), -torch.inf).softmax(-1)
        wins = torch.sigmoid((scores[rows][:, None] - scores[rows][None]) / config.nash_scale)
        preference[rows] = (weights * wins).sum(-1) - 0.5
    preference = settle_singletons(preference, scores, groups, "zero")
    settled = torch.where(groups.counted, preference + charged, 0.0)
    advantages = spread_over_tokens(settled, response_mask, token_level_rewards.dtype)
    return advantages, advantages
