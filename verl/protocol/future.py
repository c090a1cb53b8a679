"""Batches that are still being computed: what a non-blocking call returns and the next call takes.

What a reference is depends on the runtime (a `concurrent.futures.Future` in one process, an object reference on a
cluster), so a runtime registers how its references are fetched; this file knows none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from verl.errors import WorkerError
from verl.protocol.batch import DataProto

FetchAll = Callable[[list[Any]], list[Any]]
_FETCHERS: dict[type, FetchAll] = {}


def register_reference(kind: type, fetch_all: FetchAll) -> None:
    """Teach `resolve` a runtime's reference type; ``fetch_all`` waits for a list of them and gives their values."""
    _FETCHERS[kind] = fetch_all


def is_reference(value: Any) -> bool:
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


@dataclass
class DataProtoFuture:
    """References to the parts of a batch, how they are put together, and which part of the whole is meant.

    It may only be given to another worker-group call (whose workers fetch it) or fetched with `get`.
    """

    collect_fn: Callable[[list[Any]], Any]
    futures: list[Any]
    dispatch_fn: Callable[[Any], Any] | None = None

    @staticmethod
    def concat(data: list[Any]) -> DataProtoFuture:
        """The batch whose parts are behind these references."""
        return DataProtoFuture(collect_fn=DataProto.concat, futures=list(data))

    def chunk(self, chunks: int) -> list[DataProtoFuture]:
        """``chunks`` futures; number i stands for the i-th equal part of the whole batch."""
        return [
            DataProtoFuture(
                collect_fn=self.collect_fn,
                futures=self.futures,
                dispatch_fn=partial(_part, before=self.dispatch_fn, chunks=chunks, index=index),
            )
            for index in range(chunks)
        ]

    def get(self) -> Any:
        """Wait, put the parts together and select."""
        whole = self.collect_fn(resolve(self.futures))
        return whole if self.dispatch_fn is None else self.dispatch_fn(whole)


def _part(whole: Any, before: Callable[[Any], Any] | None, chunks: int, index: int) -> Any:
    """A module-level function, so that a future can travel to another process."""
    if before is not None:
        whole = before(whole)
    return whole.chunk(chunks)[index]


register_reference(Future, lambda futures: [future.result() for future in futures])
