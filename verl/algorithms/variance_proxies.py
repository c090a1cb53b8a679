"""How much of the policy gradient is signal, and how much noise."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.algorithms.masked import masked_mean, masked_sum, zero_outside


@torch.no_grad()
def variance_proxies(
    advantages: Tensor,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    response_mask: Tensor,
    rollout_is_weights: Tensor | None = None,
    gradient_norm: float | None = None,
) -> dict[str, float]:
    """Signal strength, total power and noise of the gradient of a batch.

    The squared gradient of a response with respect to its logits is taken for W = sum of w_t over its tokens, with
    w_t = 1 - 2 pi(y_t) + sum_v pi(v)^2, times the squared importance weight where there is one. With A the mean
    advantage of a response and N responses::

        proxy1_signal_strength  S = gradient_norm^2
        proxy2_total_power      P = mean of W A^2
        proxy3_pure_noise       (P - S) / (N - 1)

    Args:
        advantages, old_log_probs, sum_pi_squared, response_mask, rollout_is_weights: (B, T).
        gradient_norm: of the update; None leaves out what needs it.

    Returns:
        Nothing where no token is valid.
    """
    counted = response_mask.bool().any(dim=-1)
    if not counted.any():
        return {}
    proxy = 1 - 2 * zero_outside(old_log_probs, response_mask).exp() + zero_outside(sum_pi_squared, response_mask)
    if rollout_is_weights is not None:
        proxy = proxy * rollout_is_weights**2
    weight = masked_sum(proxy, response_mask, axis=-1)[counted]
    squared = masked_mean(advantages, response_mask, axis=-1)[counted] ** 2
    power = (weight * squared).mean().item()
    proxies = {
        "proxy2_total_power": power,
        "expected_a_squared": squared.mean().item(),
        "expected_w": weight.mean().item(),
    }
    if gradient_norm is not None:
        proxies["proxy1_signal_strength"] = gradient_norm**2
        if len(weight) > 1:
            proxies["proxy3_pure_noise"] = (power - gradient_norm**2) / (len(weight) - 1)
    return proxies
