"""What is said of a configuration, which is read-only, is worked out once."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

T = TypeVar("T")


def per_config(function: Callable[[Any], T]) -> Callable[[Any], T]:
    """Remembers the answer of a function of one configuration for as long as that object lives."""
    known: dict[int, tuple[weakref.ref[Any], T]] = {}

    @wraps(function)
    def answer(config: Any) -> T:
        key = id(config)
        entry = known.get(key)
        if entry is None or entry[0]() is not config:
            entry = known[key] = weakref.ref(config, lambda _: known.pop(key, None)), function(config)
        return entry[1]

    return answer
