"""Keys and values in pages of fixed size at fixed addresses: what decoding with CUDA graphs needs.

A row is a list of pages. Rows of one prompt share the pages that the prompt fills completely; the rest of it is copied
into each row's own page, so that nothing shared is ever written. All bookkeeping is on the host; the device sees one
table of page numbers.

Shapes: L layers, N pages, h key/value heads, P tokens per page, d head dimension, R rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from verl.errors import RolloutError
from verl.rollout.hf.kv_pool import KVShape

PAGE = 64
"""Tokens per page."""
SCRATCH = 0
"""The page that rows without a request write to and read from."""


@dataclass
class Seat:
    """Where a row's keys and values are.

    Args:
        pages: in the order of the sequence.
        reserved: pages that the row may still take.
    """

    pages: list[int]
    reserved: int


def pages_for(num_tokens: int) -> int:
    return -(-num_tokens // PAGE)


@dataclass
class PagedCache:
    """A pool of pages.

    Args:
        num_pages: with the scratch page.

    Attributes:
        keys, values: (L, N, h, P, d).
    """

    shape: KVShape
    num_pages: int
    keys: torch.Tensor = field(init=False)
    values: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        s = self.shape
        size = (s.num_layers, self.num_pages, s.num_heads, PAGE)
        # Zeros, because attention multiplies cells that hold no token by an exact zero.
        self.keys = torch.zeros(*size, s.key_dim, dtype=s.dtype, device=s.device)
        self.values = torch.zeros(*size, s.value_dim, dtype=s.dtype, device=s.device)
        self._free = list(range(self.num_pages - 1, SCRATCH, -1))
        self._users = [0] * self.num_pages
        self._num_reserved = 0

    @property
    def num_available(self) -> int:
        """Pages that nobody holds or has reserved."""
        return len(self._free) - self._num_reserved

    @property
    def num_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def seat(
        self, pieces: Sequence[tuple[torch.Tensor, torch.Tensor]], lengths: Sequence[int], promised: int = 0
    ) -> list[Seat]:
        """Seats for rows of one prompt, with its keys and values in place.

        Args:
            pieces: keys and values (L, h, tokens, d) of the prompt, in order.
            lengths: per row the most tokens, prompt included, that it will ever have.
            promised: pages that had been reserved for these rows.

        Raises:
            RolloutError: there are not enough pages; whoever admits rows must look at `num_available`.
        """
        self._num_reserved -= promised
        keys, values = (torch.cat(parts, dim=2) if len(parts) > 1 else parts[0] for parts in zip(*pieces))
        num_tokens = keys.shape[2]
        num_shared, rest = divmod(num_tokens, PAGE)
        shared = [self._take() for _ in range(num_shared)]
        seats = []
        for length in lengths:
            own = [self._take()] if rest else []
            seat = Seat([*shared, *own], max(0, pages_for(length) - num_shared - len(own)))
            self._num_reserved += seat.reserved
            seats.append(seat)
        for page in shared:
            self._users[page] = len(seats)
        if self.num_available < 0:
            raise RolloutError("the cache has no page left", key="actor_rollout_ref.rollout.max_num_seqs")
        whole = num_shared * PAGE
        for pool, given in ((self.keys, keys), (self.values, values)):
            if shared:
                pool[:, shared] = given[:, :, :whole].unflatten(2, (num_shared, PAGE)).transpose(1, 2)
            if rest:
                pool[:, [seat.pages[-1] for seat in seats], :, :rest] = given[:, :, whole:].unsqueeze(1)
        return seats

    def promise(self, num_pages: int) -> None:
        """Keep so many pages for a row that will be seated later (negative: it will not come)."""
        self._num_reserved += num_pages

    def extend(self, seat: Seat) -> int:
        """One more page for a row; returns it."""
        if seat.reserved:
            seat.reserved -= 1
            self._num_reserved -= 1
        page = self._take()
        seat.pages.append(page)
        return page

    def leave(self, seat: Seat) -> None:
        """The row has ended."""
        self._num_reserved -= seat.reserved
        for page in seat.pages:
            self._users[page] -= 1
            if not self._users[page]:
                self._free.append(page)
        seat.pages, seat.reserved = [], 0

    def _take(self) -> int:
        if not self._free:
            raise RolloutError("the cache has no page left", key="actor_rollout_ref.rollout.max_num_seqs")
        page = self._free.pop()
        self._users[page] = 1
        return page
