"""DPPO bounded by the binary KL (https://arxiv.org/abs/2602.04879). Shapes: b rows, T response tokens."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from verl.algorithms.policy_losses.base import Tokens, policy_loss
from verl.algorithms.policy_losses.dppo import EPSILON, loss_within, probabilities
from verl.config.schema.actor import ActorConfig


@policy_loss()
def dppo_kl(tokens: Tokens, config: ActorConfig | None) -> tuple[Tensor, Mapping[str, Tensor]]:
    """`loss_within` the distance D with the sign of p - q, (b, T); p and q are the current and the old probability.

    ::

        D = q log(q / p) + (1 - q) log((1 - q + 1e-8) / (1 - p + 1e-8))
    """
    (p, q), log_ratio = probabilities(tokens), tokens.log_ratio.detach()
    divergence = (1 - q) * torch.log((1 - q + EPSILON) / (1 - p + EPSILON)) - q * log_ratio
    return loss_within(tokens, config, torch.copysign(divergence, log_ratio))
