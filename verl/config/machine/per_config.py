"""A cache for functions of a configuration, which is read-only: each is computed once."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

T = TypeVar("T")


def per_config(function: Callable[[Any], T]) -> Callable[[Any], T]:
    """Remembers the answer of a function of one configuration for as long as that object lives."""
    cache: dict[int, tuple[weakref.ref[Any], T]] = {}

    @wraps(function)
    def answer(config: Any) -> T:
        key = id(config)
        entry = cache.get(key)
        if entry is None or entry[0]() is not config:
            entry = cache[key] = weakref.ref(config, lambda _: cache.pop(key, None)), function(config)
        return entry[1]

    return answer
