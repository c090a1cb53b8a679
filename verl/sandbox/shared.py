"""One pool for the whole process, for callers that have no reason to hold their own."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from verl.sandbox.pool import Pool

_lock = threading.Lock()  # any thread that asks for a pool: two would start two
_pools: dict[tuple[str, ...], Pool] = {}


def default_pool(allow_missing: Sequence[str] = ()) -> Pool:
    """The pool of this process with these concessions; it starts with its first run and ends with the process."""
    key = tuple(sorted(allow_missing))
    with _lock:
        if key not in _pools:
            _pools[key] = Pool(allow_missing=key)
        return _pools[key]
