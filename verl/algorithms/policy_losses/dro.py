"""Direct reward optimization (Richemond et al., arXiv 2405.19107)."""

from __future__ import annotations

from typing import Any

import torch

from verl.algorithms.policy_losses.kernel import Block, Terms, policy_loss
from verl.errors import ConfigError


@policy_loss()
def dro(block: Block, config: Any) -> Terms:
    """A policy gradient that a square pulls back to the old policy.

    With d the log-ratio and beta = policy_loss.dro_beta > 0::

        x = -(A log_prob - beta / 2 d^2)
        dx / dlog_prob = -(A - beta d)
    """
    beta = dro_beta(config)
    loss = torch.square(block.log_ratio, out=block.spare()).mul_(beta / 2)
    loss.addcmul_(block.advantages, block.log_prob, value=-1.0)
    return Terms(loss, block.log_ratio.mul_(beta).sub_(block.advantages))


def dro_beta(config: Any) -> float:
    """The weight of the square; it has no default."""
    beta = None if config is None else config.policy_loss.dro_beta
    if beta is None or not beta > 0:
        raise ConfigError(
            "the policy loss dro weighs the squared log-ratio with a number of yours",
            key="actor_rollout_ref.actor.policy_loss.dro_beta",
            got=beta,
            allowed="above 0",
        )
    return float(beta)
