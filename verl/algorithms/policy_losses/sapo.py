"""Soft adaptive policy optimization (https://arxiv.org/abs/2511.20347). Shapes: b rows, T response tokens."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from verl.algorithms.policy_losses.base import Tokens, policy_loss
from verl.config.schema.actor import ActorConfig


@policy_loss(forced_agg_mode="seq-mean-token-mean")
def sapo(tokens: Tokens, config: ActorConfig | None) -> tuple[Tensor, Mapping[str, Tensor]]:
    """A smooth gate in place of the clip, (b, T).

    With r the ratio, A the advantage, sigma the logistic function, tau = tau_pos where A > 0, else tau_neg::

        x = -A (4 / tau) sigma(tau (r - 1)),        aggregated as seq-mean-token-mean

    The gradient is that of -A r at r = 1 and vanishes away from it. Settings: actor.tau_pos, actor.tau_neg.
    """
    positive, negative = (1.0, 1.05) if config is None else (float(config.tau_pos), float(config.tau_neg))
    tau = torch.full_like(tokens.advantages, negative).masked_fill(tokens.advantages > 0, positive)
    return -tokens.advantages * (4 / tau) * torch.sigmoid(tau * (tokens.ratio - 1)), {}
