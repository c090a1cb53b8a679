"""Pipeline stages under upstream's path."""

from collections.abc import Iterator, Sequence
from typing import Any


def make_batch_generator(batches: Sequence[Any], vpp_size: int) -> Iterator[Any] | list[Iterator[Any]]:
    """An iterator over micro-batches, one per virtual stage where there are several."""
    return iter(batches) if vpp_size <= 1 else [iter(batches) for _ in range(vpp_size)]
