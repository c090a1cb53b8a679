"""Cutting a model over ranks layer by layer, and filling the pieces from a whole one.

Each transformer layer is one unit: its weights are gathered in one collective in front of its forward pass and freed
behind it. What lies outside the layers (embeddings, last norm, head) is the root's unit.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from verl.distributed import Ranks
from verl.distributed.shards import scatter
from verl.metrics import notice
from verl.models.weights import named_tensors


@dataclass(frozen=True)
class Layout:
    """How a model is cut.

    Args:
        mesh: ``(shard,)`` or ``(replicate, shard)``.
        device: where it computes.
        dtype: of the computation; weights of another dtype are cast while they are gathered, gradients are reduced in
            float32.
        reshard_after_forward: free a layer's weights behind its forward pass and gather them again for the backward.
        offload: weights, gradients and optimizer live on the host.
    """

    mesh: DeviceMesh
    device: str
    dtype: torch.dtype
    reshard_after_forward: bool = True
    offload: bool = False

    @property
    def home(self) -> str:
        """Where the pieces live between collectives."""
        return "cpu" if self.offload else self.device


def shard(model: nn.Module, layout: Layout) -> None:
    """Cut a model without values (``meta``) in place, and give its pieces memory; `fill` gives them values."""
    policy: OffloadPolicy = OffloadPolicy()
    if layout.offload:
        policy = CPUOffloadPolicy(pin_memory=layout.device != "cpu")
    common: dict[str, Any] = {
        "mesh": layout.mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=layout.dtype, reduce_dtype=torch.float32),
        "offload_policy": policy,
    }
    for _, layer in layers(model):
        fully_shard(layer, reshard_after_forward=layout.reshard_after_forward, **common)
    # The root's weights are used last and needed first by the backward pass: they stay until then (None).
    fully_shard(model, reshard_after_forward=None if layout.reshard_after_forward else False, **common)
    model.to_empty(device=layout.home)


def fill(model: nn.Module, source: nn.Module | None, layout: Layout, ranks: Ranks) -> None:
    """Give a cut model the values of a whole one.

    Args:
        source: the same model with values, on rank 0; None elsewhere.
    """
    whole = named_tensors(source) if source is not None else {}
    for name, target in named_tensors(model).items():
        if isinstance(target, DTensor):
            scatter(whole[name].detach() if ranks.is_first else _no_values(target), target)
    if source is not None:
        loose = {name: tensor for name, _, tensor in _loose_tensors(source)}
    for name, holder, tensor in list(_loose_tensors(model)):
        value = torch.empty(tensor.shape, dtype=tensor.dtype, device=layout.device)
        if ranks.is_first:
            value.copy_(loose[name])
        setattr(holder, name.rpartition(".")[2], ranks.broadcast(value))


def layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The transformer layers by name, as the family itself says what must not be split."""
    kinds = set(model._no_split_modules or ())  # type: ignore[arg-type]  # a set of names on every transformers model
    found = [(name, m) for name, m in model.named_modules() if type(m).__name__ in kinds]
    if not found:
        notice(f"sharding of {type(model).__name__}", "the family names no layers, so the model is gathered as a whole")
    return found


def units(model: nn.Module, prefixes: list[str]) -> Iterator[dict[str, Tensor]]:
    """Weights under their names in memory, one layer (or what lies between layers) at a time."""

    def unit(item: tuple[str, Tensor]) -> str:
        return next((p for p in prefixes if item[0].startswith(f"{p}.")), "")

    for _, group in itertools.groupby(named_tensors(model).items(), key=unit):
        yield dict(group)


def reshard(model: nn.Module) -> None:
    """Free what a forward pass left gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def report(model: nn.Module) -> str:
    """How much of a cut model this rank holds, in words."""
    pieces = [p for p in model.parameters() if isinstance(p, DTensor)]
    own, whole = sum(p.to_local().nbytes for p in pieces), sum(p.numel() * p.element_size() for p in pieces)
    gathered = sum(isinstance(module, FSDPModule) for module in model.modules())
    return f"{own} of {whole} bytes of weights; a forward pass gathers them in {gathered} steps"


def _no_values(target: DTensor) -> Tensor:
    return torch.empty(target.shape, dtype=target.dtype, device="meta")


def _loose_tensors(model: nn.Module) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Buffers and tensors that a module keeps as plain attributes (rotary frequencies): every rank has them whole."""
    for prefix, module in model.named_modules():
        for name, value in [*module._buffers.items(), *vars(module).items()]:
            if isinstance(value, Tensor):
                yield f"{prefix}.{name}", module, value
