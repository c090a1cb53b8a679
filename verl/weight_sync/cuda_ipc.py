"""Weights between two processes on one GPU: buckets in device memory that both have mapped.

The ring, its states and its headers are those of `shared_memory`; only the bodies of the slots lie on the device, in an
allocation of the trainer's that the sampler opens by its IPC handle.
"""

from __future__ import annotations

import base64
from typing import Any, ClassVar

import torch

from verl.weight_sync.shared_memory import SLOTS, SharedMemoryTransport


class CudaIpcTransport(SharedMemoryTransport):
    """One end of a ring in device memory; see `SharedMemoryTransport`.

    Args:
        path, handle: of the other end (`address`); None makes a ring.
        device: where the ring is made.

    Example:
        >>> ours = CudaIpcTransport(bucket_bytes=512 << 20)
        >>> theirs = CudaIpcTransport(**ours.address)  # in the sampler's process
    """

    not_options: ClassVar[tuple[str, ...]] = ("path", "handle")

    keeps_bodies = False

    def __init__(
        self,
        path: str | None = None,
        handle: list[Any] | None = None,
        bucket_bytes: int = 512 << 20,
        device: str = "cuda",
        timeout: float = 300.0,
    ):
        super().__init__(path, bucket_bytes, timeout)
        if handle is None:
            self._bodies = torch.empty(SLOTS * self.bucket_bytes, dtype=torch.uint8, device=device)
        else:
            torch.cuda.init()  # opening a handle before there is a context ends the process without a word
            storage = torch.UntypedStorage._new_shared_cuda(*(_decoded(part) for part in handle))
            self._bodies = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        self._handle = handle

    @classmethod
    def begin(cls, bucket_bytes: int, device: str = "cuda", **options: Any) -> CudaIpcTransport:
        return cls(bucket_bytes=bucket_bytes, device=device, **options)

    @property
    def address(self) -> dict[str, Any]:
        if self._handle is None:
            self._handle = [_encoded(part) for part in self._bodies.untyped_storage()._share_cuda_()]
        return {**super().address, "handle": self._handle}

    def close(self) -> None:
        self._bodies = torch.empty(0, dtype=torch.uint8)
        super().close()

    def _slot(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        first = number * self.bucket_bytes
        return super()._slot(number)[0], self._bodies[first : first + self.bucket_bytes]


def _encoded(part: Any) -> Any:
    return {"bytes": base64.b64encode(part).decode()} if isinstance(part, bytes) else part


def _decoded(part: Any) -> Any:
    return base64.b64decode(part["bytes"]) if isinstance(part, dict) else part
