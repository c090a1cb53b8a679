"""Batches that are still being computed: what a non-blocking call returns and the next call takes.

It knows no runtime: runtimes register their reference types in `verl.protocol.references`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from verl.protocol.batch import DataProto
from verl.protocol.references import resolve


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
        result = self.collect_fn(resolve(self.futures))
        return result if self.dispatch_fn is None else self.dispatch_fn(result)


def _part(result: Any, before: Callable[[Any], Any] | None, chunks: int, index: int) -> Any:
    """A module-level function, so that a future can travel to another process."""
    if before is not None:
        result = before(result)
    return result.chunk(chunks)[index]
