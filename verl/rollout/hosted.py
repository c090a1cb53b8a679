"""A sampler in another process, with weights that come by a transport: both sides of it.

The sampler and its `WeightIntake` are in the other process, behind a handle of Ray or behind HTTP. `RemoteSampler` is
the sampler that requests see from elsewhere, `HostedSampler` the one that weights are sent to as well. An update is
under way at both ends at once: the intake takes the stream while a thread here sends it. Whatever goes wrong with it
ends the transport, and the next update makes a new one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any

from verl.errors import RolloutError
from verl.outcomes import on_error
from verl.registry import TRANSPORTS
from verl.rollout.base import Completion, Request, Sampler
from verl.rollout.lost import LOSSES
from verl.single_controller.base.handle import Handle
from verl.weight_sync import Transport, WeightChunk
from verl.weight_sync.transport import PeerFailedError


class WeightIntake:
    """Takes weights for a sampler of this process.

    Args:
        sampler: gets them.
        device: for the receiving ends of transports.
    """

    def __init__(self, sampler: Sampler, device: str = "cpu"):
        self.sampler, self.device = sampler, device
        self._ends: dict[str, Transport] = {}

    def endpoints(self) -> Mapping[type, object]:
        """Handles on this object reach the sampler, too."""
        return {Sampler: self.sampler}

    async def status(self) -> dict[str, Any]:
        """``version`` of the weights, and ``stats``."""
        return {"version": self.sampler.version, "stats": self.sampler.stats()}

    async def take_weights(self, kind: str, address: Mapping[str, Any], version: int) -> int:
        """Receive a full stream from the other end of a transport; returns the version in use afterwards."""
        key = json.dumps([kind, address], sort_keys=True)
        if key not in self._ends:  # the trainer made a new transport: the old ones are no longer used
            for old in self._ends.values():
                old.close()
            self._ends = {key: TRANSPORTS.get(kind).reach(address, self.device)}
        end = self._ends[key]
        end.expect(version)
        with on_error(lambda _: self._ends.pop(key).close()):
            await self.sampler.update_weights(end.receive(), version)
        return self.sampler.version


def _remoteness(error: BaseException) -> int:
    """How far an error is from the cause: a dead process breaks its connections, and both fail the transfer."""
    return 0 if isinstance(error, LOSSES) else 2 if isinstance(error, PeerFailedError) else 1


Generate = Callable[[Any, Request], Coroutine[Any, Any, Completion]]


class RemoteSampler(Sampler):
    """A sampler behind a handle; its weights are sent separately.

    Args:
        handle: on a process with a sampler and its `WeightIntake`.
        generate: the method that samples, where it is not the sampler's.

    Example:
        >>> service = SamplerService({name: RemoteSampler(handle) for name, handle in handles.items()})
    """

    def __init__(self, handle: Handle, generate: Generate = Sampler.generate):
        self._handle, self._generate = handle, generate
        self._version = 0
        self._stats: dict[str, float] = {"forward_tokens": 0.0, "steps": 0.0}

    @property
    def version(self) -> int:
        return self._version

    async def generate(self, request: Request) -> Completion:
        return await self._handle.call(self._generate, request)

    async def drawn(self, known: Mapping[str, int]) -> dict[str, Completion]:
        return await self._handle.call(Sampler.drawn, known)

    async def abort(self, request_ids: Iterable[str] | None = None) -> int:
        return await self._handle.call(Sampler.abort, None if request_ids is None else list(request_ids))

    async def sleep(self, level: int = 1) -> None:
        await self._handle.call(Sampler.sleep, level)

    async def wake(self) -> None:
        await self._handle.call(Sampler.wake)

    async def confirm(self, version: int) -> int:
        status = await self._handle.call(WeightIntake.status)
        self._version, self._stats = int(status["version"]), status["stats"]
        return self._version

    def stats(self) -> dict[str, float]:
        """As of the last query of its version."""
        return dict(self._stats)

    async def update_weights(self, chunks: Iterable[WeightChunk], version: int) -> None:
        raise RolloutError(f"weights reach {self._handle.name} from the trainer's process, not through this one")


class HostedSampler(RemoteSampler):
    """A sampler behind a handle that weights are sent to from here.

    Args:
        handle: on a process with a sampler and its `WeightIntake`.
        transport: name in the registry of transports.
        begin: makes the trainer's end of one.

    Example:
        >>> sampler = HostedSampler(ChildHandle(rollout, model, "cpu", kind), *transport_of(rollout, model, "cpu"))
    """

    def __init__(self, handle: Handle, transport: str, begin: Callable[[], Transport]):
        super().__init__(handle)
        self._kind, self._begin = transport, begin
        self._transport: Transport | None = None
        self._bytes_sent = 0.0

    def stats(self) -> dict[str, float]:
        """As they were after the last update of the weights, and ``weight_bytes_sent``."""
        return {**self._stats, "weight_bytes_sent": self._bytes_sent}

    async def update_weights(self, chunks: Iterable[WeightChunk], version: int) -> None:
        if self._transport is None:
            self._transport = await asyncio.to_thread(self._begin)
        transport = self._transport
        sending: asyncio.Future[Any] = asyncio.ensure_future(asyncio.to_thread(transport.send, chunks))
        taking: asyncio.Future[Any] = asyncio.ensure_future(
            self._handle.call(WeightIntake.take_weights, self._kind, transport.address, version)
        )
        try:
            await asyncio.wait({sending, taking}, return_when=asyncio.FIRST_EXCEPTION)
            if taking.done() and taking.exception() is not None:
                transport.abandon(str(taking.exception()))
            ends = await asyncio.gather(sending, taking, return_exceptions=True)
        except BaseException:  # cancelled: the thread must end before its memory goes
            transport.abandon("the update was cancelled")
            taking.cancel()
            await asyncio.wait({sending})
            self.forget_transport()
            raise
        errors = [error for error in ends if isinstance(error, BaseException)]
        if errors:
            self.forget_transport()
            raise min(errors, key=_remoteness)
        sent: Any = ends[0]
        self._bytes_sent += float(sent)
        await self.confirm(version)

    def forget_transport(self) -> None:
        """The next update makes a new one."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()

    def close(self) -> None:
        """End the other process."""
        self.forget_transport()
        close = getattr(self._handle, "close", None)
        if close is not None:
            close()
