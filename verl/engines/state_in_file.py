"""Where an optimizer's state waits on a CPU: in a file, because the host's memory is what it would free.

A state that waits stays readable (a checkpoint may be written meanwhile): its tensors look into a mapped file, whose
pages are in memory only while somebody reads them. The file has no name and goes with the last of them.
"""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from verl.device import give_memory_back
from verl.errors import EngineError
from verl.protocol.codec import tensor_bytes

ALIGNMENT = 64


class StateInFile:
    """Takes the state of one optimizer out of memory and back, bit for bit."""

    def __init__(self) -> None:
        self._is_away = False

    def offload(self, optimizer: Optimizer) -> None:
        """Write the state to a file; nothing to do where it waits there already.

        Raises:
            EngineError: there is no room for it.
        """
        places = list(_places(optimizer))
        if self._is_away or not places:
            return
        try:
            stored = in_file([_own(entries[key]) for entries, key in places])
        except OSError as error:
            raise EngineError(
                f"the optimizer's state cannot wait in a file: {error.strerror}",
                key="optimizer_offload",
                got=tempfile.gettempdir(),
                fix="Set TMPDIR to a folder with room, or leave optimizer_offload out.",
            ) from error
        for (entries, key), tensor in zip(places, stored):
            entries[key] = _like(entries[key], tensor)
        self._is_away = True
        give_memory_back("cpu")

    def reload(self, optimizer: Optimizer) -> None:
        """Read the state into memory again."""
        if self._is_away:
            for entries, key in _places(optimizer):
                entries[key] = _like(entries[key], _own(entries[key]).clone())
            self._is_away = False


def in_file(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same numbers in the memory of a file, which later writes to ``tensors`` do not reach.

    Raises:
        OSError: no room.
    """
    places, end = [], 0
    with tempfile.TemporaryFile(prefix="verl-waiting-") as file:
        for tensor in tensors:
            end += -end % ALIGNMENT
            places.append(end)
            file.seek(end)
            end += file.write(tensor_bytes(tensor).data)
        file.flush()
        memory = mmap.mmap(file.fileno(), end, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    parts = (whole[place : place + tensor.nbytes] for place, tensor in zip(places, tensors))
    return [part.view(tensor.dtype).view(tensor.shape) for part, tensor in zip(parts, tensors)]


def _places(optimizer: Optimizer) -> Iterator[tuple[dict[str, Any], str]]:
    """Where the state's tensors are; counters are not worth a file."""
    for entries in optimizer.state.values():
        for key, entry in entries.items():
            if isinstance(entry, Tensor) and _own(entry).numel() > 1:
                yield entries, key


def _own(entry: Tensor) -> Tensor:
    """What this process has of a tensor."""
    return entry.to_local() if isinstance(entry, DTensor) else entry


def _like(entry: Tensor, own: Tensor) -> Tensor:
    """``own`` laid out over the processes as ``entry`` is."""
    if not isinstance(entry, DTensor):
        return own
    mesh, placements = entry.device_mesh, entry.placements
    return DTensor.from_local(own, mesh, placements, run_check=False, shape=entry.shape, stride=entry.stride())
