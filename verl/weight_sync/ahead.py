"""A stream of weights that is read before its receiver can take it: while a forward pass still reads the old ones.

Consumes: a stream of chunks. Waits for: the other end of its transport, and the receiver where no room is left for
copies. Unblocked by: the receiver's first question, after which it reads the stream itself.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextvars import copy_context
from dataclasses import replace

from verl.weight_sync.chunks import WeightChunk, taking


class ReadAhead(Iterator[WeightChunk]):
    """The same stream, of which a thread copies the beginning until the receiver asks for it.

    Args:
        chunks: a transport's, whose tensors are valid until the next chunk is asked for.
        num_bytes: of all copies that are alive at once.

    Example:
        >>> with closing(ReadAhead(end.receive(), 512 << 20)) as stream:
        ...     await paused()
        ...     inventory.receive(stream, version)
    """

    def __init__(self, chunks: Iterable[WeightChunk], num_bytes: int):
        self._chunks, self._room = iter(chunks), num_bytes
        self._copies: deque[WeightChunk] = deque()
        self._next: WeightChunk | None = None
        """What the thread read last and could or need not copy."""
        self._end: BaseException | None = None
        self._is_wanted = self._is_reading = self._is_closed = False
        # The thread that reads and the receiver's: who waits, waits for the thread's chunk. None copies with it held.
        self._change = threading.Condition()
        self._is_reading = True
        threading.Thread(target=copy_context().run, args=(self._read,), name="verl-read-ahead", daemon=True).start()

    def __next__(self) -> WeightChunk:
        with self._change:
            self._is_wanted = True
            if self._is_closed:
                raise StopIteration
            self._change.wait_for(lambda: self._copies or not self._is_reading)
            if self._copies:
                return self._copies.popleft()
            chunk, self._next = self._next, None
        if chunk is not None:
            return chunk
        if self._end is not None:
            raise self._end
        return next(self._chunks)

    def close(self) -> None:
        """Ask for no more. A thread that waits for the other end tells it once it hears of it."""
        with self._change:
            is_ours = not self._is_reading and not self._is_closed
            self._is_wanted = self._is_closed = True
            self._copies.clear()
            self._next = None
        if is_ours:
            self._let_go()

    def _let_go(self) -> None:
        with taking(self._chunks):
            pass

    def _read(self) -> None:
        while True:
            try:
                chunk = next(self._chunks)
            except StopIteration:
                return self._stop(None, StopIteration())
            except BaseException as error:  # carried over to the receiver
                return self._stop(None, error)
            if self._is_wanted or chunk.num_bytes > self._room:
                return self._stop(chunk)
            self._room -= chunk.num_bytes
            copy = replace(chunk, tensors=[(name, tensor.detach().clone()) for name, tensor in chunk.tensors])
            del chunk
            with self._change:
                if not self._is_closed:
                    self._copies.append(copy)
                self._change.notify_all()
            del copy

    def _stop(self, chunk: WeightChunk | None, error: BaseException | None = None) -> None:
        """From here on the receiver has the stream."""
        with self._change:
            self._next, self._end, self._is_reading = chunk, error, False
            is_closed = self._is_closed
            self._change.notify_all()
        if is_closed:
            self._let_go()
