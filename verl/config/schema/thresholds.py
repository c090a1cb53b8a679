"""Thresholds of the rollout correction: what a person writes, read into bounds, and refused where it makes no sense.

Nothing here knows tensors: the same reading serves the check of a configuration and the mathematics in
`verl.algorithms.rollout_correction`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from verl.errors import ConfigError, suggest

LEVELS = ("token", "sequence", "geometric")
MODES = ("truncate", "mask")
REJECTIONS = (
    "token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3", "seq_mean_k1", "seq_mean_k2",
    "seq_mean_k3", "seq_max_k2", "seq_max_k3",
)  # fmt: skip
_IS, _CORRECTION = "algorithm.rollout_is", "algorithm.rollout_correction"


@dataclass(frozen=True)
class Bounds:
    """A closed interval of ratios; a lower bound of 0 stands for none."""

    lower: float
    upper: float


@dataclass(frozen=True)
class ImportanceSampling:
    """How importance weights are made and bounded (``algorithm.rollout_is_*``).

    Args:
        bounds: the interval that ``mask`` keeps; ``truncate`` caps at its upper end.
        level: one ratio per token, per sequence (product), or per sequence as the geometric mean of its tokens.
        mode: ``truncate`` caps weights, ``mask`` sets those outside the bounds to zero.
        veto_threshold: a sequence with a token whose ratio is below it gets weight 0; None vetoes nothing.
    """

    bounds: Bounds
    level: str = "token"
    mode: str = "truncate"
    veto_threshold: float | None = 1e-4


@dataclass(frozen=True)
class Rejection:
    """One option of ``rollout_rs``: what it measures, and the interval of that statistic which is kept.

    The statistics are k1 = -log r, k2 = (log r)^2 / 2 and k3 = r - 1 - log r of the ratio r (trainer over sampler); a
    person writes the bounds of k1 as ratios.
    """

    option: str
    upper: float
    lower: float | None = None

    @property
    def level(self) -> str:
        """``token`` drops tokens, ``seq_sum``, ``seq_mean`` and ``seq_max`` drop full sequences."""
        return self.option.rpartition("_")[0]

    @property
    def divergence(self) -> str:
        """``k1``, ``k2`` or ``k3``."""
        return self.option.rpartition("_")[2]


def importance_sampling(
    threshold: float,
    lower: float | None = None,
    level: str = "token",
    mode: str = "truncate",
    veto_threshold: float | None = 1e-4,
) -> ImportanceSampling:
    """The seed form, checked. ``lower`` None is ``1 / threshold``.

    Raises:
        ConfigError: an unknown level or mode, or thresholds that make no sense.
    """
    for name, value, allowed in (("level", level, LEVELS), ("mode", mode, MODES)):
        if value not in allowed:
            fix = suggest(str(value), allowed)
            raise ConfigError(f"unknown {name}", key=f"{_IS}_{name}", got=value, allowed=allowed, fix=fix)
    bounds = ratio_bounds(threshold, lower, f"{_IS}_threshold", f"{_IS}_threshold_lower")
    if veto_threshold is not None and not 0 < _number(veto_threshold, f"{_IS}_veto_threshold") < 1:
        raise ConfigError(
            "a veto is for ratios that are far too small",
            key=f"{_IS}_veto_threshold",
            got=veto_threshold,
            allowed="above 0 and below 1, such as 1e-4, or null for no veto",
        )
    return ImportanceSampling(bounds, level, mode, veto_threshold)


def ratio_bounds(upper: Any, lower: Any, key: str, lower_key: str | None = None) -> Bounds:
    """Bounds of a ratio; ``lower`` None is ``1 / upper``, which takes an upper bound above 1."""
    high = _number(upper, key)
    if high <= 0:
        raise ConfigError("a bound of a ratio must be positive", key=key, got=upper, allowed="above 0, such as 2.0")
    if lower is None:
        if high <= 1:
            message = "without a lower bound it is 1 / upper, which would not lie below the upper one"
            raise ConfigError(message, key=key, got=upper, allowed="above 1, such as 2.0")
        return Bounds(1 / high, high)
    low = _number(lower, lower_key or key)
    if not 0 < low < high:
        raise ConfigError(
            f"the lower bound must be positive and below the upper one, {high:g}",
            key=lower_key or key,
            got=lower,
            allowed=f"above 0 and below {high:g}, or null for 1 / upper" if lower_key else "'low_high' with low < high",
        )
    return Bounds(low, high)


def weight_bounds(threshold: float | str) -> tuple[Bounds, bool]:
    """``rollout_correction.rollout_is_threshold``: a number caps (TIS), a text ``low_high`` zeroes outside (IcePop).

    With a cap, 1 / cap is the lower bound of the metrics; a cap of 1 or less has none.

    Returns:
        The bounds, and whether weights outside them are zeroed.
    """
    key = f"{_CORRECTION}.rollout_is_threshold"
    parts = str(threshold).split("_")
    if len(parts) == 2:
        return ratio_bounds(parts[1], parts[0], key), True
    cap = _number(threshold, key)
    if cap <= 0:
        raise ConfigError("a cap of weights must be positive", key=key, got=threshold, allowed="above 0, such as 2.0")
    return Bounds(1 / cap if cap > 1 else 0.0, cap), False


def rejections(options: str | Sequence[str], thresholds: Any) -> tuple[Rejection, ...]:
    """``rollout_rs`` with ``rollout_rs_threshold``: options with commas, one threshold for all or one for each.

    Raises:
        ConfigError: an unknown option, no threshold, too few or too many, or one of the wrong form.
    """
    key, limit = f"{_CORRECTION}.rollout_rs", f"{_CORRECTION}.rollout_rs_threshold"
    names = [name.strip() for name in (options.split(",") if isinstance(options, str) else options)]
    for name in names:
        if name not in REJECTIONS:
            fix = suggest(name, REJECTIONS)
            raise ConfigError("no such way of rejecting", key=key, got=name, allowed=REJECTIONS, fix=fix)
    if thresholds is None:
        raise ConfigError("rejection needs a threshold", key=limit, fix="Set e.g. '0.5_2.0' for a k1 option.")
    if isinstance(thresholds, str):
        thresholds = [part.strip() for part in thresholds.split(",")]
    elif isinstance(thresholds, int | float):
        thresholds = [thresholds]
    values = list(thresholds)
    values = values * len(names) if len(values) == 1 else values
    if len(values) != len(names):
        message = f"{len(names)} options of rollout_rs need one threshold for all, or one for each"
        raise ConfigError(message, key=limit, got=thresholds)
    made: dict[str, Rejection] = {}
    for name, value in zip(names, values):
        rejection = _rejection(name, value, limit)
        if made.setdefault(name, rejection) != rejection:
            raise ConfigError(f"two thresholds for {name}", key=limit, got=thresholds, fix="Keep the narrower one.")
    return tuple(made.values())


def _rejection(option: str, threshold: Any, key: str) -> Rejection:
    parts = str(threshold).split("_")
    if option.endswith("k1"):
        low, high = parts if len(parts) == 2 else (None, threshold)
        bounds = ratio_bounds(high, low, key)
        return Rejection(option, upper=-math.log(bounds.lower), lower=-math.log(bounds.upper))
    if len(parts) != 1 or _number(threshold, key) <= 0:
        message = f"{option} is a divergence, which has an upper bound only"
        raise ConfigError(message, key=key, got=threshold, allowed="one number above 0, such as 0.01")
    return Rejection(option, upper=_number(threshold, key))


def _number(value: Any, key: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ConfigError("not a number", key=key, got=value, allowed="a number, or a text 'low_high'") from None
    if not math.isfinite(number):
        raise ConfigError("not a finite number", key=key, got=value)
    return number
