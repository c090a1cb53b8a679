"""A dynamic factor on the loss of float16 training.

float16 has no number between 0 and 6e-8, and few below 6e-5, where most gradients of a mean over tokens lie. The loss
times S has gradients S times as large; they are divided by S, in float32, in front of the optimizer. If one overflows,
the step is skipped and S halved; after a row of steps without overflow S doubles again.
Micikevicius et al. 2018, "Mixed Precision Training", section 3.2, arXiv 1710.03740.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

FIRST = 2.0**16
LEAST, MOST = 1.0, 2.0**24
"""Below 1 an overflow is not that of the scale; above 2^24 nothing that float32 keeps of a gradient is still lost."""
INTERVAL = 400
"""Steps without overflow before the scale doubles: a reinforcement-learning run has hundreds of steps, not millions."""


class LossScale:
    """The scale S of one optimizer, a power of two, so that dividing by it is exact; 1 and constant above float16.

    All ranks must call `taken` and `overflowed` alike: the norm of the gradient, by which they decide, is global.

    Args:
        dtype: of matrix products.
    """

    def __init__(self, dtype: torch.dtype = torch.float32):
        self.is_dynamic = dtype == torch.float16
        self.value = FIRST if self.is_dynamic else 1.0
        self.steps = 0
        """Optimizer steps since the scale was last changed."""

    def times(self, loss: Tensor) -> Tensor:
        """S * ``loss``, in its dtype; the same tensor where S is 1."""
        return loss if self.value == 1.0 else loss * self.value

    def unscale(self, grads: Iterable[Tensor]) -> None:
        """Divide gradients by S in place."""
        if self.value == 1.0:
            return
        for grad in grads:
            grad.mul_(1.0 / self.value)

    def taken(self) -> None:
        """A step was taken with this scale."""
        self.steps += 1
        if self.is_dynamic and self.steps >= INTERVAL:
            self.value, self.steps = min(2.0 * self.value, MOST), 0

    def overflowed(self) -> bool:
        """A gradient was not finite: halve S. Whether that can help: not where S is 1 already."""
        if not self.is_dynamic or self.value <= LEAST:
            return False
        self.value, self.steps = self.value / 2.0, 0
        return True

    def state(self) -> dict[str, Any]:
        """For a checkpoint; empty where nothing changes."""
        return {"loss_scale": {"value": self.value, "steps": self.steps}} if self.is_dynamic else {}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Continue from `state`; a checkpoint of another dtype has none: the scale keeps its initial value."""
        if self.is_dynamic and "loss_scale" in saved:
            self.value, self.steps = float(saved["loss_scale"]["value"]), int(saved["loss_scale"]["steps"])
