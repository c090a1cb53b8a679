"""Waits for what another thread or process does: until it is done, never for a length of time."""

from __future__ import annotations

import time
from collections.abc import Callable

HANGS = 300.0
"""Seconds after which nothing will come any more, on a busy machine either."""


def wait_until(condition: Callable[[], object], described: Callable[[], object] = lambda: "nothing came") -> None:
    """Return once ``condition`` holds; after `HANGS` seconds the test fails with what ``described`` returns."""
    end = time.monotonic() + HANGS
    while not condition():
        assert time.monotonic() < end, described()
        time.sleep(0.02)
