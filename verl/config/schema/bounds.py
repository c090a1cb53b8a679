"""What a setting may be by itself, declared where the setting is: numbers in a range, or one of some names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from verl.errors import ConfigError, suggest

DTYPES = ("auto", "fp32", "float32", "float", "bf16", "bfloat16", "fp16", "float16", "half")


@dataclass(frozen=True)
class ValueBound:
    """What is allowed, in words, and whether a value is that; null always is."""

    allowed: str
    holds: Callable[[Any], bool]

    def problems(self, key: str, value: Any) -> list[ConfigError]:
        """One if the value is outside."""
        return [] if value is None else in_range(key, value, self.allowed, self.holds(value))


@dataclass(frozen=True)
class NameBound:
    """One of some names, with what may stand in front of it or behind it."""

    names: tuple[str, ...]
    prefix: str = ""
    suffix: str = ""

    def problems(self, key: str, value: Any) -> list[ConfigError]:
        """One with the nearest name if the value is none of them."""
        return one_of(key, value.removeprefix(self.prefix).removesuffix(self.suffix), self.names)


def at_least(least: float) -> ValueBound:
    """A number from ``least`` on."""
    return ValueBound(f"{least} or more", lambda value: value >= least)


def at_most(most: float) -> ValueBound:
    """A number up to ``most``."""
    return ValueBound(f"at most {most}", lambda value: value <= most)


DTYPE, MODEL_DTYPE = NameBound(DTYPES, "torch."), NameBound(DTYPES[1:], "torch.")
LOSS_AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
KL_KINDS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "full")
LOSS_AGG_MODE, KL_KIND = NameBound(LOSS_AGG_MODES), NameBound(KL_KINDS, suffix="+")
COUNT, AMOUNT, POSITIVE = at_least(1), at_least(0), ValueBound("above 0", lambda value: value > 0)
SHARE = ValueBound("0 to 1", lambda value: 0 <= value <= 1)
PORTION = ValueBound("above 0, at most 1", lambda value: 0 < value <= 1)
ROWS = ValueBound("-1 for all rows, or 1 or more", lambda value: value == -1 or value >= 1)
TOP_K = ValueBound("-1 for all tokens, or 1 or more", lambda value: value >= -1)
SECONDS = ValueBound("more than 0 seconds, or null", lambda value: value > 0)
EVERY = ValueBound("-1 for never, or a number of steps", lambda value: value >= -1)
COPIES = ValueBound("-1 for checkpoints only, or a number of steps", lambda value: value == -1 or value >= 1)
STEPS = ValueBound(
    "a list of steps, each 1 or more",
    lambda steps: all(isinstance(step, int) and not isinstance(step, bool) and step >= 1 for step in steps),
)
BETAS = ValueBound(
    "two numbers, each at least 0 and below 1",
    lambda betas: (
        isinstance(betas, list | tuple)
        and len(betas) == 2
        and all(isinstance(beta, int | float) and 0 <= beta < 1 for beta in betas)
    ),
)


def in_range(key: str, value: Any, allowed: str, holds: bool) -> list[ConfigError]:
    """A problem unless ``holds``; ``allowed`` says the range in words."""
    return [] if holds else [ConfigError("out of range", key=key, got=value, allowed=allowed)]


def one_of(key: str, value: Any, choices: Iterable[str]) -> list[ConfigError]:
    """A problem unless the value is one of the names, with the nearest of them."""
    choices = list(choices)
    if value in choices:
        return []
    return [ConfigError("unknown value", key=key, got=value, allowed=choices, fix=suggest(str(value), choices))]
