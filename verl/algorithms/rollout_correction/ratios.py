"""The ratio between the trainer's and the sampler's probability of what was sampled, in log space.

Shapes: B rows, T response tokens, N valid tokens, S rows with at least one of them. Everything is float32 (float64
stays), and positions outside the mask are never read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from verl.algorithms.masked import EPSILON, at_least_float32, zero_outside

LOG_BOUND = 20.0
"""Log-ratios are clamped to +-20 before an exponential: exp(20) is 5e8, far outside of every threshold."""


def bounded_exp(log_values: Tensor) -> Tensor:
    """``exp`` after the clamp to +-`LOG_BOUND`, finite for every input that is not NaN."""
    return log_values.clamp(-LOG_BOUND, LOG_BOUND).exp()


@dataclass(frozen=True)
class Rows:
    """Which tokens count, and sums over the rows that have any.

    Args:
        mask: (B, T) bool.
        lengths: (B,) valid tokens of each row, in the dtype of the arithmetic.
        filled: (B,) bool, rows with a valid token; the others are in no statistic over sequences.
    """

    mask: Tensor
    lengths: Tensor
    filled: Tensor

    @classmethod
    def of(cls, response_mask: Tensor, dtype: torch.dtype = torch.float32) -> Rows:
        mask = response_mask.bool()
        lengths = mask.sum(dim=-1)
        return cls(mask, lengths.to(dtype), lengths > 0)

    def means(self, values: Tensor) -> Tensor:
        """(B, T), zero outside the mask -> (B,): the mean over each row's valid tokens; 0 for an empty row."""
        return values.sum(dim=-1) / (self.lengths + EPSILON)

    def spread(self, per_row: Tensor) -> Tensor:
        """(B,) -> (B, T): a row's value on each of its valid tokens, 0 elsewhere."""
        return torch.where(self.mask, per_row[:, None], 0.0)


def check_same_shape(**tensors: Tensor | None) -> None:
    """Raise `ValueError` unless all given tensors are (B, T) alike."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items() if tensor is not None}
    if len(set(shapes.values())) > 1 or any(len(shape) != 2 for shape in shapes.values()):
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"the tensors must have one shape (rows, response tokens); got {listed}")


def log_ratio(old_log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor) -> Tensor:
    """(B, T): log of trainer's over sampler's probability of each token, 0 outside the mask; not clamped."""
    check_same_shape(old_log_prob=old_log_prob, rollout_log_prob=rollout_log_prob, response_mask=response_mask)
    difference = at_least_float32(old_log_prob.detach()) - at_least_float32(rollout_log_prob.detach())
    return zero_outside(difference, response_mask)


def by_level(log_ratio: Tensor, rows: Rows, level: str) -> Tensor:
    """The log-weights of a level: (B, T) for ``token``; (B,) for ``sequence`` (sum) and ``geometric`` (mean)."""
    if level == "token":
        return log_ratio
    return log_ratio.sum(dim=-1) if level == "sequence" else rows.means(log_ratio)
