"""Process rewards from a reward model that was never shown a process (Cui et al., arXiv 2502.01456).

A language model phi and its reference rate every token by how much likelier phi finds it::

    r_t = beta (log phi(y_t) - log ref(y_t))

Their sum is the logit of the answer being right, so phi learns from outcomes o in [0, 1] alone::

    L = - mean over rows of [ o log s(sum_t r_t) + (1 - o) log s(- sum_t r_t) ]

Shapes: B rows, b rows of a micro-batch, T response tokens.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from verl.algorithms.advantages.prime import prime
from verl.algorithms.aggregation import LossNorm, agg_loss, loss_metric
from verl.algorithms.groups import Groups, Singleton
from verl.algorithms.losses import field
from verl.algorithms.masked import zero_outside
from verl.metrics import Metric, as_float
from verl.protocol import declare_field

OUTCOMES = "outcomes"
"""(B,) float32 in [0, 1]: how right an answer is."""
REFERENCE = "process_ref_log_prob"
"""(B, T) float32: the log-probs of the reference."""
PROCESS_REWARDS = "process_rewards"
"""(B, T) float32: what the policy is paid per token."""

declare_field(OUTCOMES, torch.float32, ("B",), "recipe.prime", 0.0)
declare_field(REFERENCE, torch.float32, ("B", "T"), "recipe.prime", 0.0)
declare_field(PROCESS_REWARDS, torch.float32, ("B", "T"), "recipe.prime", 0.0)


def process_rewards(log_probs: Tensor, reference: Tensor, response_mask: Tensor, beta: float) -> Tensor:
    """(B, T): r_t of the formula above, 0 outside the mask."""
    return beta * zero_outside(log_probs - reference, response_mask.bool())


class ImplicitRewardLoss:
    """The cross-entropy above over the rows of a mini-batch that have a token.

    Metrics: ``dpo_loss``, as upstream calls it; ``dpo_acc_abs``, the share of rows on whose side of 1/2 the model was
    before it learnt from them.
    """

    outputs = ("log_probs",)

    def __init__(self, beta: float):
        self.beta = beta

    def __call__(self, outputs: Mapping[str, Tensor], batch: Any, norm: LossNorm) -> tuple[Tensor, dict[str, Metric]]:
        mask, outcomes = field(batch, "response_mask"), field(batch, OUTCOMES)
        logits = process_rewards(outputs["log_probs"], field(batch, REFERENCE), mask, self.beta).sum(-1)
        terms = F.binary_cross_entropy_with_logits(logits, outcomes.to(logits), reduction="none")
        # Every token of a row carries its term, so that the mean of row means is the mean over rows.
        mode, rows = "seq-mean-token-mean", mask.bool().any(-1)
        loss = agg_loss(terms[:, None].expand_as(mask), mask, mode, norm)
        right = sides_met(logits.detach(), outcomes)[rows]
        accuracy = right.mean().item() if len(right) else 0.0
        return loss, {
            "dpo_loss": loss_metric(as_float(loss.detach()), mask, mode, norm),
            "dpo_acc_abs": Metric(accuracy, "mean", float(len(right))),
        }


def sides_met(logits: Tensor, outcomes: Tensor) -> Tensor:
    """(B,) float32: 1 where a logit above 0 meets an outcome above 1/2, or neither is."""
    return ((logits > 0) == (outcomes > 0.5)).float()


def pair_accuracy(logits: Tensor, outcomes: Tensor, index: Sequence[Hashable], counted: Tensor) -> float:
    """The mean over prompts of the share of pairs of answers that the logits order as the outcomes do.

    A pair weighs as much as its outcomes differ, equal logits are half right, and a prompt whose outcomes are all the
    same counts 1/2.

    Args:
        logits, outcomes: (B,).
        index: (B,) prompt id of each row.
        counted: (B,) bool, the rows that take part.
    """
    groups, shares = Groups.of(index, counted), []
    for number in range(groups.num_groups):
        rows = (groups.ids == number) & counted
        if not rows.any():
            continue
        apart = (outcomes[rows][:, None] - outcomes[rows]).double()
        agreement = (torch.sign(logits[rows][:, None] - logits[rows]) * torch.sign(apart) + 1) / 2
        weight = apart.abs()
        shares.append(((agreement * weight).sum() / weight.sum()).item() if weight.any() else 0.5)
    return sum(shares) / len(shares) if shares else 0.5


def leave_one_out(
    process_rewards: Tensor,
    outcomes: Tensor,
    token_level_scores: Tensor,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Sequence[Hashable],
    config: Any,
    singleton: Singleton = "zero",
    form: Literal["paper", "compat"] = "paper",
) -> tuple[Tensor, Tensor]:
    """`verl.algorithms.advantages.prime.prime` of a step: process rewards and outcomes, each centred on the others'.

    A KL that the run charges in the reward is charged here, too, token by token and without a baseline.

    Args:
        process_rewards: (B, T), shaped as the settings say.
        outcomes: (B,).
        token_level_scores, token_level_rewards: (B, T), what was scored and what is left of it after the KL.
        config: the section ``algorithm``: ``reward_dpo_coef`` and ``reward_gt_coef`` weigh the two.
    """
    return prime(
        process_rewards,
        outcomes,
        response_mask,
        index,
        process_coef=config.reward_dpo_coef,
        outcome_coef=config.reward_gt_coef,
        form=form,
        singleton=singleton,
        charges=token_level_rewards - token_level_scores,
    )


leave_one_out_compat = partial(leave_one_out, form="compat")
"""In the form of upstream's recipe, which scales a token's own reward by n / (n - 1)."""
