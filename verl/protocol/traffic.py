"""Bytes of batches that go through this process: what it sends and gets by value, and the columns that it fetches.

Only a runtime with several processes counts here; in one process nothing travels.
"""

from __future__ import annotations

import threading
from collections import Counter

# Both threads of a schedule that samples ahead count, and event loops of handles; held for an addition.
_lock = threading.Lock()
_bytes: Counter[str] = Counter()


def count(what: str, num_bytes: int) -> None:
    """Bytes that went by: ``sent`` in the arguments of a call, ``received`` in its results, or ``fetched/<column>``."""
    with _lock:
        _bytes[what] += num_bytes


def take() -> dict[str, int]:
    """Bytes since the last call, by what they were; ``total`` is their sum. Empty where nothing travelled."""
    with _lock:
        counted = dict(_bytes)
        _bytes.clear()
    return {**counted, "total": sum(counted.values())} if counted else {}
