"""Resampling of a batch by its rewards: policy filtration (PF-PPO, arXiv 2409.06957)."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from verl.errors import ConfigError, suggest

ReweightMethod = Literal["pow", "max_min", "max_random"]
EPSILON = 1e-8


def reweight_probabilities(scores: Tensor, method: str = "pow", weight_pow: float = 2.0) -> Tensor:
    """How likely each row is drawn: (B,) scores -> (B,) float64 that sum to 1.

    ``pow`` weighs by |score| ** weight_pow; ``max_min`` 1 at the largest and at the smallest score, else 0;
    ``max_random`` 0.4 at the largest score, 0.1 elsewhere.

    1e-8 is added to every weight, so that scores that are all 0 are drawn evenly. A score of NaN weighs nothing.
    """
    if method not in get_args(ReweightMethod):
        methods = get_args(ReweightMethod)
        key = "algorithm.pf_ppo.reweight_method"
        raise ConfigError("unknown way to reweight", key=key, got=method, allowed=methods, fix=suggest(method, methods))
    scores, finite = scores.double(), scores.isfinite()
    if not finite.any():
        return torch.full_like(scores, 1.0 / max(1, len(scores)))
    highest, lowest = scores[finite].max(), scores[finite].min()
    if method == "pow":
        weights = scores.abs() ** weight_pow
    elif method == "max_min":
        weights = ((scores == highest) | (scores == lowest)).double()
    else:
        weights = torch.where(scores == highest, 0.4, 0.1).double()
    weights = torch.where(finite, weights + EPSILON, 0.0)
    return weights / weights.sum()


def resampled_rows(scores: Tensor, method: str = "pow", weight_pow: float = 2.0, seed: int | None = None) -> Tensor:
    """(B,) -> (B,) int64: row numbers drawn with replacement by `reweight_probabilities`.

    Args:
        seed: the same seed draws the same rows; None takes torch's generator.
    """
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    chances = reweight_probabilities(scores.cpu(), method, weight_pow)
    return torch.multinomial(chances, len(chances), replacement=True, generator=generator)
