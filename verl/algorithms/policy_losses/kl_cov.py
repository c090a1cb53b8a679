"""KL-Cov: entropy control by covariance (https://arxiv.org/abs/2505.22617). Shapes: b rows, T response tokens."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from verl.algorithms.policy_losses.base import Tokens, policy_loss
from verl.algorithms.policy_losses.covariance import covariance, mask_at, num_picked
from verl.config.schema.actor import ActorConfig


@policy_loss()
def kl_cov(tokens: Tokens, config: ActorConfig | None) -> tuple[Tensor, Mapping[str, Tensor]]:
    """The unclipped policy gradient, with a KL penalty on the share of tokens of the highest covariance; (b, T).

    With r the ratio, d its logarithm, A the advantage, beta = policy_loss.ppo_kl_coef::

        x = -A r                  + beta |d|        for the chosen tokens

    Of equal covariances at the border of the share the first are chosen. ``ppo_kl`` is the mean of |d|.
    Settings: policy_loss.kl_cov_ratio (the share), policy_loss.ppo_kl_coef.
    """
    settings = config and config.policy_loss
    share, beta = (settings.kl_cov_ratio, float(settings.ppo_kl_coef)) if settings else (2e-4, 0.1)
    cov = covariance(tokens).masked_fill(~tokens.mask, -torch.inf).flatten()
    highest = cov.sort(descending=True, stable=True).indices[: num_picked(share, tokens)]
    distance = tokens.log_ratio.abs()
    penalty = beta * distance * mask_at(highest, tokens)
    return -tokens.advantages * tokens.ratio + penalty, {"ppo_kl": distance}
