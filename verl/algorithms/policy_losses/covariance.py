"""Covariance of advantage and log-probability, by which `clip_cov` and `kl_cov` choose tokens
(https://arxiv.org/abs/2505.22617).

Tokens on which both are high drive the entropy down. The means are over the valid tokens of the micro-batch, so these
two losses depend on the size of the micro-batches, as in the paper's code. Shapes: b rows, T response tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl.algorithms.masked import masked_mean
from verl.algorithms.policy_losses.base import Tokens


def covariance(tokens: Tokens) -> Tensor:
    """(b, T), constant: ``C = (A - mean A) (log_prob - mean log_prob)``; meaningless outside the mask."""
    advantages, log_prob = tokens.advantages, tokens.log_prob.detach()
    return (advantages - masked_mean(advantages, tokens.mask)) * (log_prob - masked_mean(log_prob, tokens.mask))


def num_picked(share: float, tokens: Tokens) -> int:
    """A share of the valid tokens, at least one."""
    return max(1, int(share * int(tokens.mask.sum())))


def mask_at(where: Tensor, tokens: Tokens) -> Tensor:
    """Flat positions -> (b, T) bool that is true at them."""
    flags = torch.zeros(tokens.mask.numel(), dtype=torch.bool, device=tokens.mask.device)
    flags[where] = True
    return flags.view(tokens.mask.shape)
