"""Quantities that are not known exactly, and the shares of a data sheet that phases of a step reach."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from verl.errors import ConfigError


@dataclass(frozen=True)
class Range:
    """A quantity that is not known exactly; all three in one unit.

    Args:
        low, likely, high: ``low <= likely <= high``.
        because: the assumption that widens it most.
    """

    low: float
    likely: float
    high: float
    because: str = ""

    def __add__(self, other: Range) -> Range:
        """The sum; it names the assumption of the wider part."""
        wider = max(self, other, key=lambda part: part.high - part.low)
        return Range(self.low + other.low, self.likely + other.likely, self.high + other.high, wider.because)

    def __mul__(self, factor: float) -> Range:
        return Range(self.low * factor, self.likely * factor, self.high * factor, self.because)

    def at_least(self, other: Range) -> Range:
        """The longer of two that run at once."""
        longer = self if self.likely >= other.likely else other
        return Range(max(self.low, other.low), longer.likely, max(self.high, other.high), longer.because)

    def overlapping(self, other: Range) -> Range:
        """Two that run at once at best, and in turn at worst."""
        return replace(self.at_least(other), high=self.high + other.high)


@dataclass(frozen=True)
class Reached:
    """The share of a data sheet's figure that a phase reaches.

    Args:
        low, likely, high: shares; the low one makes the phase slow.
        source: where they are from.
        latency: likely seconds of each launch, whatever its work: a layer of a pass, an all-reduce.
    """

    low: float
    likely: float
    high: float
    source: str
    latency: float = 0.0

    def seconds(self, amount: float, rate: float, launches: float = 0.0) -> Range:
        """Of an amount of work at a nominal rate."""
        likely = amount / rate / self.likely + self.latency * launches
        return Range(likely * self.likely / self.high, likely, likely * self.likely / self.low, self.source)

    @classmethod
    def fitted(cls, points: Sequence[tuple[float, float, float]], source: str, latency: float | None = None) -> Reached:
        """To measurements: least squares of relative errors; the range has the largest of these.

        Args:
            points: seconds of the work at the nominal rate, launches, measured seconds.
            latency: as measured before; None: fitted, and at least zero.

        Raises:
            ConfigError: the measured seconds do not grow with the work.
        """
        ideal, launches, seconds = np.array(points, dtype=np.float64).T
        slowness = 0.0
        if latency is None:
            rows = np.stack([ideal, launches], 1) / seconds[:, None]
            slowness, latency = map(float, np.linalg.lstsq(rows, np.ones(len(rows)))[0])
        if latency < 0 or not slowness:
            latency = max(0.0, latency)
            left, rows = 1 - latency * launches / seconds, ideal / seconds
            slowness = float(rows @ left / (rows @ rows))
        if slowness <= 0:
            raise ConfigError("the measured seconds do not grow with the work", key=source, got=seconds.tolist(),
                              fix="Measure again while nothing else computes.")  # fmt: skip
        ratios, share = (seconds / (ideal * slowness + launches * latency)).tolist(), 1 / slowness
        return cls(share / max(1.0, *ratios), share, share / min(1.0, *ratios), source, latency)


EFFICIENCY = {
    "train": Reached(0.28, 0.40, 0.50, "share of the peak in training (docs/appendix/gpu.md: 36 to 48 %)"),
    "infer": Reached(0.28, 0.42, 0.55, "share of the peak in passes without gradients (assumed as in training)"),
    "prefill": Reached(0.28, 0.42, 0.55, "share of the peak in prefill (assumed as in training)"),
    **dict.fromkeys(
        ("decode flops", "decode built in flops"),
        Reached(0.28, 0.42, 0.55, "share of the peak in decoding (assumed as in training)"),
    ),
    "decode": Reached(0.40, 0.60, 0.80, "share of the memory bandwidth in decoding (assumed)"),
    "decode built in": Reached(
        0.11, 0.25, 0.40, "share of the bandwidth in decoding (docs/appendix/gpu.md: 11 to 32 %)"
    ),
    "link": Reached(0.40, 0.65, 0.85, "share of the links' bandwidth (assumed)", latency=20e-6),
}
"""Phase -> what it reaches, where the device has no calibration. An all-reduce of few bytes within a machine takes the
latency of ``link``, as in `placement_crossovers.py`."""
