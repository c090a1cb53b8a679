"""Group policy gradient (https://arxiv.org/abs/2504.02546). Shapes: b rows, T response tokens."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from verl.algorithms.policy_losses.base import Tokens, policy_loss
from verl.config.schema.actor import ActorConfig


@policy_loss()
def gpg_loss(tokens: Tokens, config: ActorConfig | None) -> tuple[Tensor, Mapping[str, Tensor]]:
    """The plain policy gradient, (b, T): ``x = -A log_prob`` with A the advantage, without ratio and clip."""
    return -tokens.advantages * tokens.log_prob, {}
