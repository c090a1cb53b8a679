"""Weights by broadcast in a process group: from one trainer to any number of samplers (gloo on CPU, NCCL on GPUs).

Every rank of the group takes part: the source sends, all others receive. Per bucket two small broadcasts say what
comes, one large one brings it. Buffers are reused, so that a stream of any length costs one bucket of memory per side.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from verl.errors import RolloutError
from verl.weight_sync.chunks import WeightChunk
from verl.weight_sync.transport import Transport
from verl.weight_sync.wire import MAX_HEADER, Layout, chunk_of, write_into

GAVE_UP = -1


class BroadcastTransport(Transport):
    """One rank of a group over which weights are broadcast.

    Args:
        group: of torch.distributed, or a backend of it that stands alone (`join`); None is the group of all.
        source: the sending rank, counted in the group.
        device: of the buffers; must suit the group's backend.

    Example:
        >>> BroadcastTransport(group, source=0, device="cuda").send(chunk_weights(engine.export_weights(), size, 3))
    """

    def __init__(
        self,
        group: Any = None,
        source: int = 0,
        device: str | torch.device = "cpu",
        timeout: float = 300.0,
    ):
        super().__init__(timeout)
        self.group, self.source, self.device = group, source, torch.device(device)
        self._buffer = torch.empty(0, dtype=torch.uint8, device=self.device)

    @classmethod
    def join(
        cls, address: str, rank: int, world_size: int, device: str = "cpu", timeout: float = 300.0
    ) -> BroadcastTransport:
        """Make a group of its own, beside whatever groups the process is in.

        Args:
            address: ``host:port`` at which rank 0, the source, listens.
        """
        limit = timedelta(seconds=timeout)
        host, _, port = address.rpartition(":")
        store = dist.TCPStore(host, int(port), world_size, is_master=rank == 0, timeout=limit)
        named = dist.PrefixStore("verl-weights", store)
        if not device.startswith("cuda"):
            return cls(dist.ProcessGroupGloo(named, rank, world_size, limit), 0, device, timeout)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        return cls(dist.ProcessGroupNCCL(named, rank, world_size, options), 0, device, timeout)

    def send(self, chunks: Iterable[WeightChunk]) -> int:
        num_bytes = 0
        try:
            for chunk in chunks:
                layout = Layout.of(chunk)
                body = self._room(layout.num_bytes)
                write_into(chunk, layout, body)
                text = layout.encode()
                self._announce(len(text), layout.num_bytes)
                self._broadcast(torch.frombuffer(bytearray(text), dtype=torch.uint8).to(self.device))
                self._broadcast(body)
                num_bytes += chunk.num_bytes
                del chunk  # before the next one is made
        except BaseException:
            self._announce(GAVE_UP, 0)
            raise
        return num_bytes

    def receive(self) -> Iterator[WeightChunk]:
        ended = False
        while not ended:
            lengths = torch.empty(2, dtype=torch.int64, device=self.device)
            self._broadcast(lengths)
            header_bytes, body_bytes = (int(x) for x in lengths)
            if header_bytes == GAVE_UP:
                raise RolloutError("the trainer gave up in the middle of a transfer of weights")
            if not 0 < header_bytes <= MAX_HEADER or body_bytes < 0:
                raise RolloutError("a header of weights has an impossible length", got=header_bytes)
            text = torch.empty(header_bytes, dtype=torch.uint8, device=self.device)
            self._broadcast(text)
            body = self._room(body_bytes)
            self._broadcast(body)
            layout, _ = Layout.decode(text.cpu().numpy().tobytes())
            yield chunk_of(layout, body)
            ended = layout.last

    def drain(self, chunks: Iterator[WeightChunk]) -> None:
        """Take part in the rest of a stream of which nothing is wanted, so that the other ranks can go on."""
        for _ in chunks:
            pass

    def close(self) -> None:
        self._buffer = self._buffer[:0].clone()

    def _announce(self, header_bytes: int, body_bytes: int) -> None:
        self._broadcast(torch.tensor([header_bytes, body_bytes], dtype=torch.int64, device=self.device))

    def _broadcast(self, tensor: torch.Tensor) -> None:
        if tensor.numel():
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = self.source, 0
            group: Any = dist.group.WORLD if self.group is None else self.group
            group.broadcast([tensor], options).wait()

    def _room(self, num_bytes: int) -> torch.Tensor:
        if self._buffer.numel() < num_bytes:
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        return self._buffer[:num_bytes]
