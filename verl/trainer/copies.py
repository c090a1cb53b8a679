"""``trainer.copy_check_freq``: after which steps copies of weights and optimizer states are compared."""

from __future__ import annotations

from collections.abc import Callable

from verl.metrics import notice


class CopyCheck:
    """See `Engine.compare_copies`.

    Args:
        every: in steps; below 1: never.
    """

    def __init__(self, every: int):
        self._every, self._is_first = every, True

    def is_due(self, step: int) -> bool:
        """Whether to compare after this step."""
        return self._every > 0 and step % self._every == 0

    def run(self, compare: Callable[[], int]) -> None:
        """Compare; the first time a notice says if there was nothing to compare.

        Raises:
            CopiesDifferError: ranks that hold the same hold different bits.
        """
        if not compare() and self._is_first:
            why = "has no effect: no rank holds a copy of what another one holds, so nothing can be compared"
            notice("trainer.copy_check_freq", why)
        self._is_first = False
