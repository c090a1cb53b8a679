"""DPPO bounded by the total variation (https://arxiv.org/abs/2602.04879). Shapes: b rows, T response tokens."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from verl.algorithms.policy_losses.base import Tokens, policy_loss
from verl.algorithms.policy_losses.dppo import loss_within, probabilities
from verl.config.schema.actor import ActorConfig


@policy_loss()
def dppo_tv(tokens: Tokens, config: ActorConfig | None) -> tuple[Tensor, Mapping[str, Tensor]]:
    """`loss_within` the distance ``p - q`` of the current and the old probability, (b, T)."""
    p, q = probabilities(tokens)
    return loss_within(tokens, config, p - q)
