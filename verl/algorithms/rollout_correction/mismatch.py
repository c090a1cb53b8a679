"""How far two policies differ on what one of them sampled: divergences and perplexities.

Names carry no prefix: the trainer logs them as ``mismatch/mismatch_*`` or as ``rollout_corr/*``, whichever form of the
correction runs. KL here is KL(sampler || trainer), because the sampler drew the tokens. Shapes: B rows, T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl.algorithms.masked import zero_outside
from verl.algorithms.rollout_correction.ratios import LOG_BOUND, Rows, bounded_exp, check_same_shape, log_ratio
from verl.algorithms.rollout_correction.weight_metrics import as_floats
from verl.metrics import Metric


@torch.no_grad()
def off_policy_metrics(
    old_log_prob: Tensor, rollout_log_prob: Tensor | None, response_mask: Tensor, chi2: bool = False
) -> dict[str, float]:
    """Divergence and perplexity metrics of a batch; rows without a valid token are in none of them.

    With l the log-ratio, r = exp(l) and D_i the mean log-prob of row i under the sampler minus that under the trainer::

        kl       mean over tokens of -l            (k1 of KL(sampler || trainer))
        k3_kl    mean over tokens of r - 1 - l     (>= 0)
        log_ppl_diff, _abs_diff, _diff_max, _diff_min   mean, mean of |.|, largest and smallest D_i
        ppl_ratio                                  mean of exp(D_i): perplexity of the trainer over the sampler's
        chi2_token, chi2_seq                       mean of r^2 - 1 over tokens, of (prod r)^2 - 1 over rows

    Args:
        rollout_log_prob: None leaves the trainer's own perplexity (``training_ppl``, ``training_log_ppl``).
        chi2: add the two chi-squared divergences.

    Returns:
        Nothing where no token is valid.
    """
    check_same_shape(old_log_prob=old_log_prob, rollout_log_prob=rollout_log_prob, response_mask=response_mask)
    ours = zero_outside(old_log_prob.detach(), response_mask)
    rows = Rows.of(response_mask, ours.dtype)
    if not rows.filled.any():
        return {}
    training = -rows.means(ours)[rows.filled].double()  # perplexities are exponentials of these
    metrics = {"training_log_ppl": training.mean(), "training_ppl": training.exp().mean()}
    if rollout_log_prob is None:
        return as_floats(metrics)
    theirs = zero_outside(rollout_log_prob.detach(), response_mask)
    rollout = -rows.means(theirs)[rows.filled].double()
    difference = training - rollout
    ratio = log_ratio(old_log_prob, rollout_log_prob, response_mask)
    tokens = ratio[rows.mask]
    metrics |= {
        "rollout_log_ppl": rollout.mean(),
        "rollout_ppl": rollout.exp().mean(),
        "kl": -tokens.mean(),
        "k3_kl": (tokens.clamp(-LOG_BOUND, LOG_BOUND).expm1() - tokens).mean(),  # expm1: small ratios keep digits
        "log_ppl_diff": difference.mean(),
        "log_ppl_abs_diff": difference.abs().mean(),
        "log_ppl_diff_max": difference.max(),
        "log_ppl_diff_min": difference.min(),
        "ppl_ratio": difference.exp().mean(),
    }
    if chi2:
        metrics["chi2_token"] = bounded_exp(tokens).square().mean() - 1
        metrics["chi2_seq"] = bounded_exp(ratio.sum(dim=-1)[rows.filled]).square().mean() - 1
    return as_floats(metrics)


def current_policy_metrics(log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor) -> dict[str, Metric]:
    """The same distances for the policy that is being trained, during the update: ``rollout_corr/current_*``.

    The weights of a correction compare the sampler with the old policy and stay as they are for all optimizer steps;
    these numbers say how far the policy has gone meanwhile. Each merges over micro-batches.
    """
    metrics = off_policy_metrics(log_prob, rollout_log_prob, response_mask)
    if not metrics:
        return {}
    tokens, rows = float(response_mask.bool().sum()), float(response_mask.bool().any(dim=-1).sum())
    weight = {"kl": tokens, "k3_kl": tokens, "ppl_ratio": rows, "log_ppl_diff": rows, "log_ppl_abs_diff": rows}
    return {f"rollout_corr/current_{name}": Metric(metrics[name], "mean", count) for name, count in weight.items()}


def probability_difference(old_log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor) -> dict[str, float]:
    """How far the sampler's probabilities are from the trainer's, over sampled tokens; arguments are (B, T)."""
    mask = response_mask.bool()
    if not mask.any():
        return {"training/rollout_probs_diff_valid": 0.0}
    ours, theirs = (values[mask].float().exp() for values in (old_log_prob, rollout_log_prob))
    difference = (ours - theirs).abs()
    metrics = {
        "training/rollout_probs_diff_valid": 1.0,
        "training/rollout_probs_diff_max": difference.max().item(),
        "training/rollout_probs_diff_mean": difference.mean().item(),
        "training/rollout_probs_diff_std": difference.std(correction=0).item(),
    }
    if len(ours) > 1 and ours.std() > 0 and theirs.std() > 0:
        metrics["training/rollout_actor_probs_pearson_corr"] = torch.corrcoef(torch.stack([ours, theirs]))[0, 1].item()
    return metrics
