"""The loss of online DPO: pairs that the policy sampled and the reward function judged.

For the better answer y_w and the worse one y_l to a prompt, with an earlier iterate of the policy as the reference
(self-play: Chen et al., arXiv 2401.01335; online pairs: Guo et al., arXiv 2402.04792)::

    h = [log pi(y_w) - log pi(y_l)] - [log ref(y_w) - log ref(y_l)],      loss = -log s(beta h)

Log-probabilities are those of whole answers. Shapes: b = 2 m rows, T response tokens.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from verl.algorithms.aggregation import LossNorm
from verl.algorithms.preference import REFERENCE_SUMS, DPOLoss, answer_sums
from verl.metrics import Metric, as_float


def dpo(
    log_prob: Tensor, ref_log_prob: Tensor, response_mask: Tensor, config: Any, norm: LossNorm
) -> tuple[Tensor, dict[str, Metric]]:
    """The mean of the loss above over the pairs of the mini-batch.

    Row 2 i is the chosen answer of a pair, row 2 i + 1 the rejected one; rows without tokens are the places of prompts
    that have no pair, and count nowhere.

    Args:
        log_prob, ref_log_prob, response_mask: (b, T); zero outside the mask.
        config: the section ``actor_rollout_ref.actor``, with ``dpo_beta``.

    Metrics: ``dpo_loss`` and those of `verl.algorithms.preference.DPOLoss`.
    """
    loss, metrics = dpo_of_pairs(log_prob, ref_log_prob, response_mask, config.dpo_beta, norm)
    if not metrics:
        return loss, metrics
    here = float(len(rows_of_pairs(response_mask))) / 2
    mean = as_float(loss.detach()) / norm.dp_size * (norm.num_sequences / 2) / here
    return loss, {"dpo_loss": Metric(mean, "mean", here), **metrics}


def dpo_of_pairs(
    log_prob: Tensor, ref_log_prob: Tensor, response_mask: Tensor, beta: float, norm: LossNorm
) -> tuple[Tensor, dict[str, Metric]]:
    """The loss of `dpo` with its ``beta``, and the metrics of `DPOLoss`; none where the mini-batch has no pair."""
    rows = rows_of_pairs(response_mask)
    if not len(rows):
        return log_prob.sum() * 0.0, {}  # with a graph: the engine calls backward
    mask = response_mask[rows]
    batch = {"response_mask": mask, REFERENCE_SUMS: answer_sums(ref_log_prob[rows], mask)}
    return DPOLoss(beta)({"log_probs": log_prob[rows]}, batch, norm)


def rows_of_pairs(response_mask: Tensor) -> Tensor:
    """(2 p,) the rows that have tokens."""
    return response_mask.bool().any(-1).nonzero().flatten()
