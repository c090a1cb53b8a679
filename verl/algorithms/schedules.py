"""Learning-rate schedules: pure factors of the step, and the torch schedulers made from them.

A factor multiplies the configured learning rate. Schedulers advance once per global step, after its last mini-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from verl.config.schema.role import OptimizerConfig
from verl.errors import ConfigError, suggest

SCHEDULES = ("constant", "cosine", "wsd")


def warmup_steps(total_steps: int, steps: int | None = -1, ratio: float = 0.0) -> int:
    """``steps`` where it is positive, else (None included) that share of the run, rounded down."""
    return steps if steps is not None and steps > 0 else int(ratio * total_steps)


def cosine_factor(
    step: int,
    num_warmup_steps: int,
    num_training_steps: int,
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
    init_lr_ratio: float = 0.0,
) -> float:
    """Linear from ``init_lr_ratio`` to 1, then a cosine down to ``min_lr_ratio`` (half a cycle by default)."""
    if step < num_warmup_steps:
        return init_lr_ratio + (1.0 - init_lr_ratio) * step / num_warmup_steps
    progress = (step - num_warmup_steps) / max(1, num_training_steps - num_warmup_steps)
    wave = math.cos(2.0 * math.pi * num_cycles * progress)
    return max(min_lr_ratio, (1.0 - min_lr_ratio) / 2.0 * wave + (1.0 + min_lr_ratio) / 2.0)


def wsd_factor(
    step: int,
    num_warmup_steps: int,
    num_training_steps: int,
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
    stable_ratio: float = 0.9,
) -> float:
    """Warm-up, stable for ``stable_ratio`` of what is left, then a cosine down to ``min_lr_ratio``, which stays."""
    if step < num_warmup_steps:
        return step / num_warmup_steps
    decay_from = num_warmup_steps + int(stable_ratio * (num_training_steps - num_warmup_steps))
    if step < decay_from:
        return 1.0
    if step >= num_training_steps:
        return min_lr_ratio
    progress = (step - decay_from) / max(1, num_training_steps - decay_from)
    wave = math.cos(2.0 * math.pi * num_cycles * progress)
    return (1.0 - min_lr_ratio) * 0.5 * (1.0 + wave) + min_lr_ratio


@dataclass(frozen=True)
class Decay:
    """Megatron's schedule: a warm-up, then one of its styles down to a floor; called with a step it gives the factor.

    Args:
        style: constant, linear, cosine, inverse_square_root or WSD (constant, then ``wsd_style`` at the end).
        warmup: steps from ``start`` to 1.
        until: step of the floor, the warm-up included.
        start, floor: shares of the learning rate.
        wsd_style: linear, cosine, exponential or minus_sqrt.
        wsd_steps: steps of that end.
    """

    style: str
    warmup: int
    until: float
    start: float = 0.0
    floor: float = 0.0
    wsd_style: str = "exponential"
    wsd_steps: float | None = None

    @classmethod
    def of(cls, optim: OptimizerConfig, warmup: int, total_steps: int) -> Decay:
        """From an ``optim`` section, which has learning rates where this has shares of ``lr``."""
        until, whole = optim.lr_decay_steps, optim.lr or 1.0
        start, floor = optim.lr_warmup_init / whole, optim.min_lr / whole
        check_ratio("lr_warmup_init", start)
        check_ratio("min_lr", floor)
        until = total_steps if until is None else until
        return cls(
            optim.lr_decay_style, warmup, until, start, floor, optim.lr_wsd_decay_style, optim.lr_wsd_decay_steps
        )

    def __call__(self, step: int) -> float:
        if self.warmup and step <= self.warmup:
            return self.start + (1.0 - self.start) * step / self.warmup
        if self.style == "constant":
            return 1.0
        if step > self.until:
            return self.floor
        if self.style == "inverse_square_root":
            return max(self.floor, math.sqrt(max(self.warmup, 1) / max(step, 1)))
        return self.floor + (1.0 - self.floor) * self._height(step)

    def _height(self, step: int) -> float:
        """Where the step is between the floor (0) and the full rate (1)."""
        if self.style == "WSD":
            assert self.wsd_steps is not None
            passed = (step - self.until) / self.wsd_steps + 1.0
            return _SHAPES[self.wsd_style](passed) if passed > 0 else 1.0
        return _SHAPES[self.style]((step - self.warmup) / max(1, self.until - self.warmup))


_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda passed: 1.0 - passed,
    "cosine": lambda passed: 0.5 * (math.cos(math.pi * passed) + 1.0),
    "exponential": lambda passed: 2.0 * 0.5**passed - 1.0,
    "minus_sqrt": lambda passed: 1.0 - math.sqrt(passed),
}
"""Share of a decay that is over -> height, from 1 to 0."""


def get_constant_schedule_with_warmup(optimizer: Optimizer, num_warmup_steps: int, last_epoch: int = -1) -> LambdaLR:
    """Linear from 0 to 1 over the warm-up, then 1; without a warm-up 1 from the first step on."""
    return LambdaLR(optimizer, Decay("constant", num_warmup_steps, until=num_warmup_steps), last_epoch)


def get_cosine_schedule_with_warmup(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
    last_epoch: int = -1,
    init_lr_ratio: float | None = None,
    zero_indexed_step: bool = True,
) -> LambdaLR:
    """The scheduler of `cosine_factor`; with ``zero_indexed_step=False`` the first update counts as step 1."""
    check_ratio("min_lr_ratio", min_lr_ratio)
    check_ratio("init_lr_ratio", init_lr_ratio or 0.0)
    offset = 0 if zero_indexed_step else 1

    def factor(step: int) -> float:
        return cosine_factor(
            step + offset, num_warmup_steps, num_training_steps, min_lr_ratio, num_cycles, init_lr_ratio or 0.0
        )

    return LambdaLR(optimizer, factor, last_epoch)


def get_wsd_schedule_with_warmup(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
    last_epoch: int = -1,
    stable_ratio: float = 0.9,
) -> LambdaLR:
    """The scheduler of `wsd_factor`."""
    check_ratio("min_lr_ratio", min_lr_ratio)
    check_ratio("stable_ratio", stable_ratio)

    def factor(step: int) -> float:
        return wsd_factor(step, num_warmup_steps, num_training_steps, min_lr_ratio, num_cycles, stable_ratio)

    return LambdaLR(optimizer, factor, last_epoch)


def build_schedule(optimizer: Optimizer, optim: OptimizerConfig, total_training_steps: int) -> LambdaLR:
    """The scheduler that an ``optim`` section describes.

    Args:
        optim: lr_scheduler_type, lr_warmup_steps, lr_warmup_steps_ratio, min_lr_ratio, num_cycles, zero_indexed_step;
            with lr_scheduler_type=constant Megatron's lr_decay_style and what belongs to it.
        total_training_steps: global steps of the run.
    """
    kind = optim.lr_scheduler_type
    warmup = warmup_steps(total_training_steps, optim.lr_warmup_steps, optim.lr_warmup_steps_ratio)
    if kind == "constant":
        return LambdaLR(optimizer, Decay.of(optim, warmup, total_training_steps))
    if kind == "cosine":
        return get_cosine_schedule_with_warmup(
            optimizer,
            warmup,
            total_training_steps,
            optim.min_lr_ratio or 0.0,
            optim.num_cycles,
            zero_indexed_step=optim.zero_indexed_step,
        )
    if kind == "wsd":
        return get_wsd_schedule_with_warmup(
            optimizer, warmup, total_training_steps, optim.min_lr_ratio or 0.0, optim.num_cycles
        )
    raise ConfigError(
        "unknown learning-rate schedule",
        key="lr_scheduler_type",
        got=kind,
        allowed=SCHEDULES,
        fix=suggest(str(kind), SCHEDULES),
    )


def check_ratio(key: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise ConfigError("must lie between 0 and 1", key=f"optim.{key}", got=value)
