"""The critic's regression on the returns, clipped as in PPO (Schulman et al., arXiv 1707.06347)."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.algorithms.aggregation import LossNorm, agg_loss
from verl.algorithms.masked import masked_mean, zero_outside


def value_loss(
    vpreds: Tensor,
    returns: Tensor,
    values: Tensor,
    response_mask: Tensor,
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
    norm: LossNorm | None = None,
) -> tuple[Tensor, Tensor]:
    """``agg(max((v - R)^2, (clip(v, v_old - eps, v_old + eps) - R)^2)) / 2``.

    Args:
        vpreds: (b, T) the critic's new values, with gradient.
        returns, values: (b, T) the targets and the values before this update.

    Returns:
        The loss, and the share of tokens on which the clipped error is the larger one.
    """
    vpreds, returns, values = (zero_outside(x, response_mask) for x in (vpreds, returns, values))
    clipped = torch.clamp(vpreds, values - cliprange_value, values + cliprange_value)
    error, clipped_error = (vpreds - returns) ** 2, (clipped - returns) ** 2
    loss = 0.5 * agg_loss(torch.maximum(error, clipped_error), response_mask, loss_agg_mode, norm)
    return loss, masked_mean((clipped_error > error).float(), response_mask).detach()
