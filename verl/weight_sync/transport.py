"""What every transport between processes is: one end sends a stream of chunks, the other end receives it.

Both ends are made from the same address, a small JSON-able mapping that travels with the call that starts the update.
The receiver's iterator goes straight into `update_weights` of a sampler, so that what is wrong with a stream (cut off,
mixed versions, missing weights) is found in one place, and a sampler whose update did not finish refuses to sample.
"""

from __future__ import annotations

import inspect
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

from verl.errors import RolloutError
from verl.weight_sync.chunks import WeightChunk

NAP_SHARE, LONGEST_NAP = 0.1, 1e-3
"""A nap while waiting is this part of the time waited so far: a wait takes hardly longer for it, and a long wait
leaves the processor to those that work. The first naps are the shortest ones of the system, some 0.1 ms."""


class PeerFailedError(RolloutError):
    """The other end failed, and its own error says why."""


class Transport(ABC):
    """One end of a connection between a trainer and a sampler.

    Args:
        timeout: seconds without a sign of the other end after which it counts as lost.
    """

    not_options: ClassVar[tuple[str, ...]] = ()
    """Arguments that are not the configuration's to set."""

    def __init__(self, timeout: float = 300.0):
        self.timeout = timeout
        self._abandoned = ""

    @classmethod
    def begin(cls, bucket_bytes: int, device: str = "cpu", **options: Any) -> Transport:
        """The trainer's end.

        Args:
            bucket_bytes: most bytes of a chunk.
            device: on which the weights are.
            options: ``rollout.checkpoint_engine.engine_kwargs``.
        """
        return cls(**options)

    @classmethod
    def options(cls) -> list[str]:
        """Names of the arguments of `begin` that a configuration may set."""
        parameters = {**inspect.signature(cls).parameters, **inspect.signature(cls.begin).parameters}
        named = {"bucket_bytes", "device", *cls.not_options}
        return [name for name, p in parameters.items() if name not in named and p.kind is not p.VAR_KEYWORD]

    @classmethod
    def reach(cls, address: Mapping[str, Any], device: str = "cpu") -> Transport:
        """The sampler's end: the other end of what `begin` made, by its `address`."""
        return cls(**address)

    @property
    def address(self) -> dict[str, Any]:
        """What `reach` needs, as JSON."""
        raise AssertionError(f"{type(self).__name__} has one form for both ends")

    def expect(self, version: int) -> None:  # noqa: B027 -- most transports bring whatever comes next
        """The version that `receive` is to bring."""

    def abandon(self, reason: str) -> None:
        """From another thread: a wait for the other end stops."""
        self._abandoned = reason

    @abstractmethod
    def send(self, chunks: Iterable[WeightChunk]) -> int:
        """Send a whole stream; returns once the other end has taken it all. The result is the number of bytes.

        If ``chunks`` raises, the other end is notified, and its `receive` raises too.
        """

    @abstractmethod
    def receive(self) -> Iterator[WeightChunk]:
        """The stream that the other end sends. A chunk's tensors are valid until the next one is requested.

        Raises:
            RolloutError: the other end gave up or was silent for ``timeout`` seconds.
        """

    def close(self) -> None:  # noqa: B027 -- most transports hold nothing
        """Free what this end holds."""

    def wait_until(self, ready: Callable[[], bool], what: str) -> None:
        """Poll, the more seldom the longer it takes.

        Raises:
            RolloutError: not within ``timeout`` seconds, or after a call of `abandon`.
        """
        begin = time.monotonic()
        while not ready():
            if self._abandoned:
                raise PeerFailedError(f"weight transfer: stopped while it waited for {what}: {self._abandoned}")
            waited = time.monotonic() - begin
            if waited > self.timeout:
                raise RolloutError(
                    f"weight transfer: waited {self.timeout:.0f} s for {what}",
                    fix="Did the process at the other end die? Its log says more.",
                )
            time.sleep(min(NAP_SHARE * waited, LONGEST_NAP))
