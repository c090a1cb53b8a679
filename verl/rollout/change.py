"""Waiting for the next change of what several coroutines share.

Consumes: the word that something changed. Waits for: it. Unblocked by: `tell`; who waited looks what changed.
"""

from __future__ import annotations

import asyncio


class ChangeEvent:
    """Coroutines that wait, of one event loop after another; they resume in the order in which they came."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[None], None] = {}

    async def wait(self) -> None:
        """Return after the next change."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[future] = None
        try:
            await future
        finally:
            del self._waiting[future]

    def tell(self) -> None:
        """Something changed."""
        for future in list(self._waiting):
            if not future.done() and not future.get_loop().is_closed():
                future.set_result(None)
