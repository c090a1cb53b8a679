"""Metrics that know how they are reduced, stage timers, and notices.

A metric from a micro-batch, a rank or a step is only a number together with its reduction: a loss that was normalised
globally is summed, a length is averaged, a maximum stays a maximum. Notices are what the library tells a person once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from verl import env
from verl.errors import hide_in_text, printable

Reduction = Literal["mean", "sum", "max", "min", "last"]
log = logging.getLogger("verl")


@dataclass(frozen=True)
class Metric:
    """One scalar with its reduction; ``weight`` is the count behind a mean (a mean over 30 tokens has weight 30)."""

    value: float
    reduction: Reduction = "mean"
    weight: float = 1.0

    def merge(self, other: Metric) -> Metric:
        """The reduction of both; the two must have the same reduction."""
        if self.reduction == "sum":
            return Metric(self.value + other.value, "sum")
        if self.reduction == "max":
            return Metric(max(self.value, other.value), "max")
        if self.reduction == "min":
            return Metric(min(self.value, other.value), "min")
        if self.reduction == "last":
            return other
        weight = self.weight + other.weight
        value = (self.value * self.weight + other.value * other.weight) / weight if weight else 0.0
        return Metric(value, "mean", weight)


class MetricSet:
    """Named metrics that merge by their own reduction.

    Example:
        >>> m = MetricSet(); m.add("actor/pg_loss", 0.1, "sum"); m.add("actor/pg_loss", 0.2, "sum"); m.values()
        {'actor/pg_loss': 0.30000000000000004}
    """

    def __init__(self, metrics: Mapping[str, Metric] | None = None):
        self._metrics: dict[str, Metric] = dict(metrics or {})

    def add(self, name: str, value: float, reduction: Reduction = "mean", weight: float = 1.0) -> None:
        self._put(name, Metric(float(value), reduction, weight))

    def merge(self, other: MetricSet | Mapping[str, Metric]) -> MetricSet:
        """Merge in place; returns self."""
        for name, metric in other.items():
            self._put(name, metric)
        return self

    def items(self) -> Iterable[tuple[str, Metric]]:
        return self._metrics.items()

    def values(self) -> dict[str, float]:
        """The reduced numbers."""
        return {name: m.value for name, m in self._metrics.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._metrics

    def __len__(self) -> int:
        return len(self._metrics)

    def _put(self, name: str, metric: Metric) -> None:
        earlier = self._metrics.get(name)
        self._metrics[name] = metric if earlier is None else earlier.merge(metric)


class Timers:
    """Seconds per named stage of a step; a stage entered twice adds up."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


_shown: dict[str, str] = {}


def start_logging() -> None:
    """Print what the library says: notices, and more with ``VERL_LOGGING_LEVEL=INFO``; every process calls it once."""
    level = (env.get("VERL_LOGGING_LEVEL") or "WARNING").upper()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    for handler in logging.getLogger().handlers:
        handler.addFilter(_escape)
    logging.getLogger("verl").setLevel(level)


def _escape(record: logging.LogRecord) -> bool:
    """Keep control characters of models, tools and rows out of the terminal, in what any package logs."""
    record.msg, record.args = printable(record.getMessage()), None
    return True


def notice(key: str, message: str) -> None:
    """Tell the person something once per process: ``key`` names the setting or the event."""
    if key in _shown:
        return
    message = hide_in_text(message)
    _shown[key] = message
    log.warning("%s", printable(f"{key}: {message}"))


def notices() -> dict[str, str]:
    """All notices of this process so far."""
    return dict(_shown)


def reset_notices() -> None:
    """Forget what was shown (a new run in the same process)."""
    _shown.clear()


def as_float(value: Any) -> float:
    """A Python float from a float, a numpy scalar or a one-element tensor."""
    return float(value.item() if hasattr(value, "item") else value)
