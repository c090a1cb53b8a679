"""Seconds of every phase of a step on a device, as ranges."""

from __future__ import annotations

from dataclasses import dataclass


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


@dataclass(frozen=True)
class Seconds:
    """Seconds of one step of a role, per phase.

    Args:
        role: its name.
        phases: ``generate``, ``infer``, ``update``, ``sync``.
    """

    role: str
    phases: dict[str, Range]

    def phase(self, name: str) -> Range:
        """A phase by its name; no time where the role has no such phase."""
        return self.phases.get(name, Range(0, 0, 0))
