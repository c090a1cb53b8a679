"""What both sharded engines decide alike: which modules are units, and what every rank keeps replicated.

A unit's weights are gathered in one collective in front of its forward pass and freed behind it. Usually each
transformer layer is one; the modules outside them (embeddings, last norm, head) belong to the root.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from verl.config.schema.role import FSDPEngineConfig
from verl.metrics import notice
from verl.models.layers import transformer_layers
from verl.models.weights import loose_tensors


@dataclass(frozen=True)
class ShardingLayout:
    """How a model is cut.

    Args:
        mesh: ``(shard,)`` or ``(replicate, shard)``.
        device: where it computes.
        dtype: of the computation; weights of another dtype are cast while they are gathered, gradients are reduced in
            float32.
        reshard_after_forward: free a unit's weights behind its forward pass and gather them again for the backward.
        offload: weights, gradients and optimizer live on the host.
        prefetch: gather the next unit while one computes.
        min_num_params: a unit is what has that many parameters; 0 takes transformer layers.
    """

    mesh: DeviceMesh
    device: str
    dtype: torch.dtype
    reshard_after_forward: bool = True
    offload: bool = False
    prefetch: bool = False
    min_num_params: int = 0

    @classmethod
    def of(cls, engine: FSDPEngineConfig, mesh: DeviceMesh, device: str, dtype: torch.dtype) -> ShardingLayout:
        """From the ``fsdp_config`` section."""
        return cls(
            mesh=mesh,
            device=device,
            dtype=dtype,
            reshard_after_forward=engine.reshard_after_forward,
            offload=engine.offload_policy,
            prefetch=engine.forward_prefetch,
            min_num_params=engine.wrap_policy.min_num_params,
        )

    @property
    def home(self) -> str:
        """Where the pieces live between collectives."""
        return "cpu" if self.offload else self.device

    @property
    def num_copies(self) -> int:
        """How often each piece exists: the shard groups of hybrid sharding."""
        return self.mesh.size() // self.mesh.size(self.mesh.ndim - 1)


def unit_modules(model: nn.Module, min_num_params: int = 0) -> list[tuple[str, nn.Module]]:
    """The units below the root by name, inner ones before the outer one that holds them."""
    units = _large(model, min_num_params) if min_num_params > 0 else transformer_layers(model)
    if not units:
        why = "no module is that large" if min_num_params > 0 else "the family names no layers"
        notice(f"sharding of {type(model).__name__}", f"{why}, so the model is gathered as a whole")
    return units


def _large(model: nn.Module, min_num_params: int) -> list[tuple[str, nn.Module]]:
    """Modules with that many parameters that no unit inside them has; lists of modules are never called, so never one.

    Tied weights stay with the root, as they must be gathered together.
    """
    owners: dict[nn.Parameter, int] = {}
    for _, p in model.named_parameters(remove_duplicate=False):
        owners[p] = owners.get(p, 0) + 1
    units: list[tuple[str, nn.Module]] = []

    def visit(name: str, module: nn.Module) -> int:
        free = sum(p.numel() for p in module.parameters(recurse=False) if owners[p] == 1)
        free += sum(visit(f"{name}.{part}".lstrip("."), child) for part, child in module.named_children())
        called = not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict)
        tied = any(owners[p] > 1 for p in module.parameters())
        if name and called and not tied and free >= min_num_params:
            units.append((name, module))
            return 0
        return free

    visit("", model)
    return units


def unit_of(name: str, prefixes: list[str]) -> str:
    """The innermost unit that a weight belongs to; empty for the root's."""
    return max((p for p in prefixes if name.startswith(f"{p}.")), key=len, default="")


def fill_loose(loose: Iterable[tuple[str, nn.Module, Tensor]], hollow: nn.Module, device: str) -> None:
    """Give `loose_tensors` of a model without values those of another one; what files hold is left as it is."""
    stored, values = set(hollow.state_dict()), {name: tensor for name, _, tensor in loose_tensors(hollow)}
    for name, holder, _ in loose:
        if name.lstrip(".") not in stored:
            setattr(holder, name.rpartition(".")[2], values[name].to(device, copy=True))
