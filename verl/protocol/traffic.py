"""Bytes of batches that go through this process: what it sends and gets by value, and the columns that it fetches.

Only a runtime with several processes counts here; in one process nothing travels.
"""

from __future__ import annotations

import threading
from collections import Counter

# Both threads of a schedule that samples ahead count, and event loops of handles; held for an addition.
_lock = threading.Lock()
_bytes: Counter[str] = Counter()


def count_fetched(column: str, num_bytes: int) -> None:
    """A column's entries were fetched from where they lie."""
    _add(f"fetched/{column}", num_bytes)


def count_sent(num_bytes: int) -> None:
    """Arguments of a call, as they are in the message."""
    _add("sent", num_bytes)


def count_received(num_bytes: int) -> None:
    """Results of a call, as they are in the message."""
    _add("received", num_bytes)


def _add(name: str, num_bytes: int) -> None:
    with _lock:
        _bytes[name] += num_bytes


def take() -> dict[str, int]:
    """Bytes since the last call, by what they were; ``total`` is their sum. Empty where nothing travelled."""
    with _lock:
        counted = dict(_bytes)
        _bytes.clear()
    return {**counted, "total": sum(counted.values())} if counted else {}
