"""Soft adaptive policy optimization (arXiv 2511.20347)."""

from __future__ import annotations

from typing import Any

import torch

from verl.algorithms.policy_losses.kernel import Block, Terms, policy_loss


@policy_loss(forced_agg_mode="seq-mean-token-mean")
def sapo(block: Block, config: Any) -> Terms:
    """A smooth gate in place of the clip.

    With r the ratio, sigma the logistic function, tau = tau_pos where A > 0 and tau_neg where A < 0::

        p = sigma(tau (r - 1))
        x = -A (4 / tau) p,                          aggregated as seq-mean-token-mean
        dx / dlog_prob = -A r 4 p (1 - p)            (-A r at r = 1, and vanishing away from it)

    Settings: actor.tau_pos, actor.tau_neg.
    """
    positive, negative = (1.0, 1.05) if config is None else (float(config.tau_pos), float(config.tau_neg))
    tau = (
        torch.sign(block.advantages, out=block.spare()).mul_((positive - negative) / 2).add_((positive + negative) / 2)
    )
    ratio = block.into_ratio()
    gate = torch.sub(ratio, 1.0, out=block.spare()).mul_(tau).sigmoid_()
    loss = block.advantages.mul_(-4.0).mul_(gate)
    slope = torch.addcmul(loss, loss, gate, value=-1.0, out=gate).mul_(ratio)
    return Terms(loss.div_(tau), slope)
