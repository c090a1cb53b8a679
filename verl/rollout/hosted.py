"""A sampler in a process of its own, with weights that come by a transport: both sides of it.

`SamplerHost` lives in the other process, behind a handle of Ray or behind HTTP. `HostedSampler` is the sampler that the
trainer's process sees. An update is under way at both ends at once: the host takes the stream while a thread here sends
it. Whatever goes wrong with it ends the transport, and the next update makes a new one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from verl.registry import SAMPLERS, TRANSPORTS
from verl.rollout.base import Completion, Request, Sampler
from verl.rollout.replicas import LOSSES, Callee
from verl.weight_sync import Transport, WeightChunk
from verl.weight_sync.transport import OtherEndError


class SamplerHost:
    """What answers in the other process.

    Args:
        sampler: of this process.
        device: for the receiving ends of transports.
    """

    def __init__(self, sampler: Sampler, device: str = "cpu"):
        self.sampler, self.device = sampler, device
        self._ends: dict[str, Transport] = {}

    async def generate(self, request: Request) -> Completion:
        return await self.sampler.generate(request)

    async def abort(self, request_ids: list[str] | None = None) -> int:
        return await self.sampler.abort(request_ids)

    async def sleep(self, level: int = 1) -> None:
        await self.sampler.sleep(level)

    async def wake(self) -> None:
        await self.sampler.wake()

    async def status(self) -> dict[str, Any]:
        """``version`` of the weights, and ``stats``."""
        return {"version": self.sampler.version, "stats": self.sampler.stats()}

    async def take_weights(self, kind: str, address: Mapping[str, Any], version: int) -> int:
        """Receive a whole stream from the other end of a transport; the version that is in use then."""
        key = json.dumps([kind, address], sort_keys=True)
        if key not in self._ends:  # the trainer made a new transport: nobody sends over the old ones any more
            for old in self._ends.values():
                old.close()
            self._ends = {key: TRANSPORTS.get(kind).reach(address, self.device)}
        end = self._ends[key]
        end.expect(version)
        try:
            await self.sampler.update_weights(end.receive(), version)
        except BaseException:
            self._ends.pop(key).close()
            raise
        return self.sampler.version


class EngineHost(SamplerHost):
    """With the engine that ``rollout.name`` names, made in the process in which this object is made.

    Args:
        rollout, model: sections of the configuration.
    """

    def __init__(self, rollout: Any, model: Any, device: str):
        super().__init__(SAMPLERS.get(rollout.name).from_config(rollout, model, device=device), device)


def _remoteness(error: BaseException) -> int:
    """How far an error is from the cause: a process that is gone breaks its connections, and both fail the transfer."""
    return 0 if isinstance(error, LOSSES) else 2 if isinstance(error, OtherEndError) else 1


@dataclass(frozen=True)
class Link:
    """Which transport goes to a hosted sampler.

    Args:
        kind: name in the registry of transports.
        make: makes the trainer's end.
    """

    kind: str
    make: Callable[[], Transport]


class HostedSampler(Sampler):
    """A sampler that lives behind a callee.

    Args:
        callee: of a `SamplerHost`.
        link: how weights get there.

    Example:
        >>> sampler = HostedSampler(host_object(ClassWithInitArgs(EngineHost, rollout, model, "cpu")), link)
    """

    def __init__(self, callee: Callee, link: Link, name: str = "the sampler's process"):
        self._callee, self._link, self.name = callee, link, name
        self._transport: Transport | None = None
        self._version = 0
        self._stats: dict[str, float] = {"forward_tokens": 0.0, "steps": 0.0}

    @property
    def version(self) -> int:
        return self._version

    async def generate(self, request: Request) -> Completion:
        done: Completion = await self._callee.call("generate", request)
        return done

    async def abort(self, request_ids: Iterable[str] | None = None) -> int:
        wanted = None if request_ids is None else list(request_ids)
        count: int = await self._callee.call("abort", wanted)
        return count

    async def sleep(self, level: int = 1) -> None:
        await self._callee.call("sleep", level)

    async def wake(self) -> None:
        await self._callee.call("wake")

    def stats(self) -> dict[str, float]:
        """As they were after the last update of the weights, and ``weight_bytes_sent``."""
        return dict(self._stats)

    async def update_weights(self, chunks: Iterable[WeightChunk], version: int) -> None:
        if self._transport is None:
            self._transport = await asyncio.to_thread(self._link.make)
        transport = self._transport
        sending: asyncio.Future[Any] = asyncio.ensure_future(asyncio.to_thread(transport.send, chunks))
        taking: asyncio.Future[Any] = asyncio.ensure_future(
            self._callee.call("take_weights", self._link.kind, transport.address, version)
        )
        try:
            await asyncio.wait({sending, taking}, return_when=asyncio.FIRST_EXCEPTION)
            if taking.done() and taking.exception() is not None:
                transport.abandon(str(taking.exception()))
            found = await asyncio.gather(sending, taking, return_exceptions=True)
        except BaseException:  # cancelled: the thread must end before its memory goes
            transport.abandon("the update was cancelled")
            taking.cancel()
            await asyncio.wait({sending})
            self.forget_transport()
            raise
        errors = [error for error in found if isinstance(error, BaseException)]
        if errors:
            self.forget_transport()
            raise min(errors, key=_remoteness)
        sent: Any = found[0]
        self._version = version
        status = await self._callee.call("status")
        total = self._stats.get("weight_bytes_sent", 0.0) + float(sent)
        self._stats = {**status["stats"], "weight_bytes_sent": total}

    def forget_transport(self) -> None:
        """The next update makes a new one."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()

    def close(self) -> None:
        """End the other process."""
        self.forget_transport()
        close = getattr(self._callee, "close", None)  # a callee of this process has none
        if close is not None:
            close()
