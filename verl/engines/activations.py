"""Activations that wait for the backward pass in host memory.

What a forward pass keeps for the backward one goes to pinned memory on the host and comes back when it is used. Weights
stay where they are: they are not activations, and the sharded engines free them by their own rules. With gradient
checkpointing only the input of each layer is kept, and that goes to the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from verl.metrics import notice

SMALLEST = 1 << 16
"""Bytes below which moving a tensor costs more than it frees."""


class OffloadedActivations:
    """Use `offloaded_activations` around a forward pass.

    Args:
        parameters: of the model; a matrix of their shapes is taken for a weight, or a cast one.
        device: kind of device whose tensors are moved.
        smallest: in bytes.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], device: str, smallest: int = SMALLEST):
        self.shapes = {p.shape for p in parameters}
        self.device, self.smallest = device, smallest
        self.moved_bytes = 0

    @contextmanager
    def offloaded_activations(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield

    def _pack(self, tensor: Tensor) -> Any:
        if not self._moves(tensor):
            return tensor
        self.moved_bytes += tensor.nbytes
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type != "cpu")
        host.copy_(tensor, non_blocking=True)
        return tensor.device, host

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        device, host = packed
        return host.to(device, non_blocking=True, copy=True)

    def _moves(self, tensor: Tensor) -> bool:
        if tensor.device.type != self.device or tensor.nbytes < self.smallest or tensor.layout != torch.strided:
            return False
        owner = tensor if tensor._base is None else tensor._base
        if isinstance(owner, nn.Parameter) or (owner.is_leaf and owner.requires_grad):
            return False
        return tensor.dim() != 2 or not {tensor.shape, tensor.shape[::-1]} & self.shapes


def host_activations(
    is_on: bool, parameters: Iterable[nn.Parameter], device: str, key: str = "enable_activation_offload"
) -> OffloadedActivations | None:
    """Where activations are moved (switched on by the setting ``key``); None where they stay."""
    if is_on and device == "cpu":
        notice(key, "has no effect on a CPU: activations are in host memory anyway")
        return None
    return OffloadedActivations(parameters, device) if is_on else None
