"""References to values in other processes, or to values that are not there yet, and how they are fetched.

What a reference is depends on the runtime (a `concurrent.futures.Future` in one process, an object reference on a
cluster), so a runtime registers how its references are fetched; this file knows none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from verl.errors import WorkerError

FetchAll = Callable[[list[Any]], list[Any]]
_FETCHERS: dict[type, FetchAll] = {}


def register_reference(kind: type, fetch_all: FetchAll) -> None:
    """Teach `resolve` a runtime's reference type; ``fetch_all`` waits for a list of them and gives their values."""
    _FETCHERS[kind] = fetch_all


def is_reference(value: object) -> bool:
    return isinstance(value, tuple(_FETCHERS))


def resolve(references: Sequence[Any]) -> list[Any]:
    """The values behind references of one runtime, in order; the first failed call raises its own exception."""
    for kind, fetch_all in _FETCHERS.items():
        if references and all(isinstance(reference, kind) for reference in references):
            return fetch_all(list(references))
    if not references:
        return []
    raise WorkerError(
        "these are not references to results of worker calls",
        got=sorted({type(reference).__name__ for reference in references}),
        allowed=sorted(kind.__name__ for kind in _FETCHERS),
    )


register_reference(Future, lambda futures: [future.result() for future in futures])
