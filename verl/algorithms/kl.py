"""The distance to the reference policy: estimators, the penalty in the reward, and the coefficient's controllers.

Estimators of KL(policy || reference) from one sampled token (joschu.net/blog/kl-approx), with a = log pi(y), b = log
pi_ref(y). Shapes: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from verl.algorithms.masked import at_least_float32, masked_mean, zero_outside
from verl.config.schema.algorithm import KLControlConfig
from verl.errors import ConfigError, suggest
from verl.metrics import notice

LOG_RATIO_BOUND = 20.0
K3_BOUND = 10.0
Measure = Callable[[Tensor, Tensor], Tensor]
"""Logits (..., V) of a model and of the one that it is compared with -> (...): the divergence of each position."""
CHUNK_NUMBERS = 1 << 22
"""Logits that `full_kl_in_chunks` works on at a time: 16 MiB in float32."""


def _k3(a: Tensor, b: Tensor) -> Tensor:
    difference = (b - a).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return (difference.exp() - difference - 1).clamp(-K3_BOUND, K3_BOUND)


ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "kl": lambda a, b: a - b,
    "k1": lambda a, b: a - b,
    "abs": lambda a, b: (a - b).abs(),
    "mse": lambda a, b: 0.5 * (a - b) ** 2,
    "k2": lambda a, b: 0.5 * (a - b) ** 2,
    "low_var_kl": _k3,
    "k3": _k3,
}


def check_kl_kind(kind: str, key: str = "kl_loss_type", logits_at_hand: bool = False) -> None:
    """Raise unless ``kind`` is an estimator that works here; ``full`` only where the logits are at hand."""
    name = kind.removesuffix("+")
    if kind == "full" and logits_at_hand:
        return
    if name == "full":
        why = "has the gradient of the KL as it is" if logits_at_hand else "needs the logits of both models"
        raise ConfigError(
            f"the exact KL {why}",
            key=key,
            got=kind,
            allowed=[*ESTIMATORS, "and each with a '+' for the gradient of k2"],
            fix="Set it to full." if logits_at_hand else "Pass logits over the whole vocabulary.",
        )
    if name not in ESTIMATORS:
        estimators = [*ESTIMATORS, "full"]
        raise ConfigError("unknown KL estimator", key=key, got=kind, allowed=estimators, fix=suggest(name, estimators))


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kind: str) -> Tensor:
    """The KL per token.

    ======================  ==================================  ============================================
    kind                    value                               gradient with respect to a
    ======================  ==================================  ============================================
    ``kl``, ``k1``          a - b                               1 (its expectation is 0: for rewards, not losses)
    ``abs``                 abs(a - b)                          sign(a - b)
    ``mse``, ``k2``         (a - b)^2 / 2                       a - b (on policy, that of the KL)
    ``low_var_kl``, ``k3``  exp(b - a) - (b - a) - 1            1 - exp(b - a)
    ``<kind>+``             that of ``<kind>``                  a - b
    ``full``                sum_v pi (log pi - log pi_ref)      exact
    ======================  ==================================  ============================================

    Args:
        logprob, ref_logprob: (B, T), or for ``full`` the logits (B, T, V), already divided by the temperature.

    Returns:
        (B, T), at least float32.
    """
    check_kl_kind(kind, logits_at_hand=logprob.dim() > 2)
    a, b = at_least_float32(logprob), at_least_float32(ref_logprob)
    if kind == "full":
        return full_kl(a, b)
    value = ESTIMATORS[kind.removesuffix("+")](a, b)
    if not kind.endswith("+"):
        return value
    gradient = ESTIMATORS["k2"](a, b)
    return gradient - gradient.detach() + value.detach()


def full_kl(logits: Tensor, ref_logits: Tensor) -> Tensor:
    """(..., V) twice -> (...): the exact KL of the two distributions."""
    log_p = torch.log_softmax(at_least_float32(logits), dim=-1)
    log_q = torch.log_softmax(at_least_float32(ref_logits), dim=-1)
    possible = log_p > -torch.inf
    difference = torch.where(possible, log_p, 0.0) - torch.where(possible, log_q, 0.0)
    return (log_p.exp() * difference).sum(dim=-1)


def full_kl_in_chunks(logits: Tensor, ref_logits: Tensor, measure: Measure = full_kl) -> Tensor:
    """(N, V) twice -> (N,): ``measure`` of a few rows at a time, computed again in the backward pass.

    So that nothing of the size of the logits is kept but the logits themselves, and their gradient.
    """
    rows = max(1, CHUNK_NUMBERS // max(1, logits.shape[-1]))
    parts = [
        checkpoint(measure, z, ref, use_reentrant=False) for z, ref in zip(logits.split(rows), ref_logits.split(rows))
    ]
    return torch.cat(parts)


class KLController(Protocol):
    """Who decides the weight of the KL in the reward."""

    value: float

    def update(self, current_kl: float, n_steps: int) -> None: ...

    def state_dict(self) -> dict[str, float]: ...

    def load_state_dict(self, state: dict[str, float]) -> None: ...


class FixedKLController:
    """A weight that never changes."""

    def __init__(self, kl_coef: float):
        self.value = float(kl_coef)

    def update(self, current_kl: float, n_steps: int) -> None:
        """Nothing to learn."""

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """The configured coefficient stays: a changed setting applies to a resumed run."""


class AdaptiveKLController:
    """A weight that follows a target KL (Ziegler et al., arXiv 1909.08593).

    After a batch of n sequences: ``value *= 1 + clip(current / target - 1, -0.2, 0.2) * n / horizon``.
    """

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: float):
        for key, number in (("target_kl", target_kl), ("horizon", horizon)):
            if not number > 0:
                raise ConfigError("must be positive", key=f"algorithm.kl_ctrl.{key}", got=number)
        self.value, self.target, self.horizon = float(init_kl_coef), float(target_kl), float(horizon)

    def update(self, current_kl: float, n_steps: int) -> None:
        """Move the weight towards the target; a KL that is not finite moves nothing."""
        if not math.isfinite(current_kl):
            notice("algorithm.kl_ctrl", "a batch had a KL that is not finite; the coefficient was kept")
            return
        error = min(max(current_kl / self.target - 1.0, -0.2), 0.2)
        self.value *= 1.0 + error * n_steps / self.horizon

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = float(state["value"])


def get_kl_controller(kl_ctrl: KLControlConfig) -> KLController:
    """The controller that ``algorithm.kl_ctrl`` (type, kl_coef, horizon, target_kl) describes."""
    if kl_ctrl.type == "fixed":
        return FixedKLController(kl_ctrl.kl_coef)
    if kl_ctrl.type == "adaptive":
        return AdaptiveKLController(kl_ctrl.kl_coef, kl_ctrl.target_kl, kl_ctrl.horizon)
    raise ConfigError(
        "unknown KL controller",
        key="algorithm.kl_ctrl.type",
        got=kl_ctrl.type,
        allowed=("fixed", "adaptive"),
        fix=suggest(kl_ctrl.type, ("fixed", "adaptive")),
    )


@torch.no_grad()
def apply_kl_penalty(
    token_level_scores: Tensor,
    old_log_probs: Tensor | None,
    ref_log_prob: Tensor | None,
    response_mask: Tensor,
    controller: KLController,
    kind: str = "kl",
    exact: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Rewards = scores - beta * KL on valid tokens (InstructGPT, arXiv 2203.02155); then the controller learns.

    Args:
        token_level_scores, old_log_probs, ref_log_prob, response_mask: (B, T); without ``exact`` all of them.
        exact: (B, T) the KL of the kind ``full``, which no log-probs of single tokens give.

    Returns:
        The rewards (B, T), and ``actor/reward_kl_penalty`` (the mean over non-empty sequences of their token means)
        with ``actor/reward_kl_penalty_coeff`` (the beta that this batch was charged, before the update).
    """
    if exact is None:
        assert old_log_probs is not None and ref_log_prob is not None, f"the KL {kind} compares log-probs"
        a, b = zero_outside(old_log_probs, response_mask), zero_outside(ref_log_prob, response_mask)
        exact = kl_penalty(a, b, kind)
    kl = zero_outside(exact, response_mask)
    beta = controller.value
    rewards = at_least_float32(token_level_scores) - beta * kl
    filled = response_mask.bool().any(dim=-1)
    current = masked_mean(kl, response_mask, axis=-1)[filled].mean().item() if filled.any() else 0.0
    controller.update(current_kl=current, n_steps=len(response_mask))
    return rewards, {"actor/reward_kl_penalty": current, "actor/reward_kl_penalty_coeff": beta}
