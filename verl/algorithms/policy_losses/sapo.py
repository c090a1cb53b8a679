"""Soft adaptive policy optimization (arXiv 2511.20347)."""

from __future__ import annotations

from typing import Any

import torch

from verl.algorithms.policy_losses.kernel import Block, Terms, policy_loss


@policy_loss(forced_agg_mode="seq-mean-token-mean")
def sapo(block: Block, config: Any) -> Terms:
    """A smooth gate in place of the clip.

    With r the ratio, sigma the logistic function, tau = tau_pos where A > 0, else tau_neg::

        p = sigma(tau (r - 1))
        x = -A (4 / tau) p,                          aggregated as seq-mean-token-mean
        dx / dlog_prob = -A r 4 p (1 - p)            (-A r at r = 1, and vanishing away from it)

    Settings: actor.tau_pos, actor.tau_neg.
    """
    positive, negative = (1.0, 1.05) if config is None else (float(config.tau_pos), float(config.tau_neg))
    is_positive = torch.gt(block.advantages, 0.0, out=torch.empty_like(block.advantages))
    tau = is_positive.mul_(positive - negative).add_(negative)
    ratio = block.ratio()
    gate = (ratio - 1.0).mul_(tau).sigmoid_()
    cost = block.advantages * -4.0
    slope = torch.addcmul(gate, gate, gate, value=-1.0).mul_(ratio).mul_(cost)
    return Terms(gate.mul_(cost).div_(tau), slope)
