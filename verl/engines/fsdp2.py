"""FSDP2: weights, gradients and optimizer state are sharded tensors (`DTensor`), one unit gathered at a time."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Container, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from verl.checkpoint.state import StateSection
from verl.config.schema.role import OptimizerConfig
from verl.distributed.axis_sharding import AxisSharding
from verl.distributed.shards import first_row, gather, scatter
from verl.engines import sharding
from verl.engines.base import Engine
from verl.engines.muon import build_muon, builds_muon
from verl.engines.sharded_engine import ShardedEngine
from verl.engines.sharded_optimizer import build_sharded_optimizer
from verl.errors import ConfigError
from verl.models.lora import has_adapter
from verl.models.stored import StoredWeights
from verl.models.weights import named_tensors
from verl.protocol.sharding import ShardSpec


class FSDP2Engine(ShardedEngine):
    """See `ShardedEngine`."""

    def _cut(self, model: Any) -> nn.Module:
        layout = self.layout
        # What a model returns is never changed in place here, which is all that this warning is about.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        policy: OffloadPolicy = OffloadPolicy()
        if layout.offload:
            policy = CPUOffloadPolicy(pin_memory=layout.device != "cpu")
        common: dict[str, Any] = {
            "mesh": layout.mesh,
            "mp_policy": MixedPrecisionPolicy(param_dtype=layout.dtype, reduce_dtype=torch.float32),
            "offload_policy": policy,
        }
        units = [unit for _, unit in sharding.unit_modules(model, layout.min_num_params)]
        self.cuts, shared, mesh = self._shard_over_peers(model)
        for module in shared:
            fully_shard(module, reshard_after_forward=layout.reshard_after_forward, **{**common, "mesh": mesh})
        for unit in units:
            fully_shard(unit, reshard_after_forward=layout.reshard_after_forward, **common)
        # The root's weights are used last and needed first by the backward pass: they stay until then (None).
        fully_shard(model, reshard_after_forward=None if layout.reshard_after_forward else False, **common)
        if layout.prefetch:
            for this, following in itertools.pairwise(units):
                this.set_modules_to_forward_prefetch([following])  # type: ignore[operator]  # an FSDPModule by now
        return model.to_empty(device=layout.home)

    def _shard_over_peers(self, model: Any) -> tuple[dict[str, AxisSharding], list[nn.Module], DeviceMesh | None]:
        """Leave this rank's part of what peers share: cuts by name, modules to be sharded, over which ranks."""
        if self.experts is None:
            return {}, [], None
        cuts, modules = self.experts.cut(model)
        return cuts, list(modules.values()), self.experts.mesh

    def _held(self) -> str:
        pieces = [p for p in self.model.parameters() if isinstance(p, DTensor)]
        local, full = sum(p.to_local().nbytes for p in pieces), sum(p.nbytes for p in self.blueprint.parameters())
        gathered = sum(isinstance(module, FSDPModule) for module in self.model.modules())
        return f"{local} of {full} bytes of weights; a forward pass gathers them in {gathered} steps"

    def _build_optimizer(self, parameters: list[nn.Parameter], optim: OptimizerConfig) -> torch.optim.Optimizer:
        if builds_muon(optim):
            if self.layout.offload and self.device != "cpu":
                raise ConfigError(
                    "Muon gathers matrices on the accelerator, and offload_policy keeps them on the host",
                    key="offload_policy",
                    got=True,
                    fix="Set offload_policy=false, or optimizer=AdamW.",
                )
            return build_muon(self.model, self.kind, optim)
        return build_sharded_optimizer(parameters, optim, self.layout)

    # ---- passes ------------------------------------------------------------------------------------------------

    def _before_micro_batch(self, last: bool) -> None:
        if self.sync_once:
            self.model.set_requires_gradient_sync(last)
            self.model.set_is_last_backward(last)

    def _after_passes(self) -> None:
        """Free what a forward pass left gathered."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    # ---- weights and state -------------------------------------------------------------------------------------

    def _units(self, only: Container[str] | None = None) -> Iterator[dict[str, Tensor]]:
        def unit(item: tuple[str, Tensor]) -> str:
            return sharding.unit_of(item[0], self.unit_names)

        selected = [item for item in named_tensors(self.model).items() if only is None or item[0] in only]
        for _, group in itertools.groupby(selected, key=unit):
            yield {name: self._gathered(tensor, name) for name, tensor in group}

    def copy_weights(self, source: Engine) -> None:
        """As `Engine.copy_weights`; piece by piece, with nothing gathered, where both cut their weights alike."""
        pieces = self._paired_pieces(source)
        if not all(self.ranks.exchange(pieces is not None)):
            super().copy_weights(source)
            return
        with torch.no_grad():
            for target, other in pieces or ():
                target.copy_(other)

    def _paired_pieces(self, source: Engine) -> list[tuple[Tensor, Tensor]] | None:
        """This rank's piece of each weight with the other engine's; None where the two differ in how they cut one."""
        if not isinstance(source, FSDP2Engine) or has_adapter(source.blueprint) or has_adapter(self.blueprint):
            return None
        targets, others = named_tensors(self.model), named_tensors(source.model)
        if targets.keys() != others.keys() or self.cuts != source.cuts:
            return None
        if any(_cut_of_piece(targets[name]) != _cut_of_piece(others[name]) for name in targets):
            return None
        return [(_piece(targets[name]), _piece(others[name])) for name in targets]

    @torch.no_grad()
    def _take(self, stored: StoredWeights) -> None:
        for name, target in named_tensors(self.model).items():
            spec, local = self._box(target, name)
            if name in stored and local.numel():
                local.copy_(stored.box(name, spec.bounds))

    def _box(self, tensor: Tensor, name: str) -> tuple[ShardSpec, Tensor]:
        """Rows of a sharded tensor; every rank has the others complete."""
        if not isinstance(tensor, DTensor):
            return super()._box(tensor, name)
        local, cut = tensor.to_local().detach(), self._cut_of(tensor, name)
        shape = tensor.shape if cut is None else cut.whole_shape(tensor.shape)
        first = 0 if cut is None else cut.start
        return ShardSpec.along(local, shape, 0, first + first_row(tensor)), local

    def _write(self, values: Mapping[str, Tensor]) -> None:
        for name, target in named_tensors(self.model).items():
            if name in values:
                self._put(values[name], target, name)

    def _gathered(self, tensor: Tensor, name: str) -> Tensor:
        """Whole on every rank: a weight, or what is laid out like the weight of this name."""
        cut = self._cut_of(tensor, name)
        return gather(tensor) if cut is None else cut.gathered(tensor)

    def _cut_of(self, tensor: Tensor, name: str) -> AxisSharding | None:
        """How a tensor is sharded that belongs to a weight: as the weight is, or it is a number that all ranks have."""
        return self.cuts.get(name) if isinstance(tensor, DTensor) else None

    def _placed(self, saved: StateSection, name: str, parameter: nn.Parameter, device: torch.device) -> Tensor:
        target = torch.zeros_like(parameter, requires_grad=False)
        spec, local = self._box(target, name.rpartition("/")[0])
        if saved.shape(name) != spec.shape:
            return super()._placed(saved, name, parameter, device)
        values = saved.box(name, spec.bounds)
        if values.dtype != local.dtype:
            target = torch.zeros_like(parameter, dtype=values.dtype, requires_grad=False)
            local = _piece(target)
        if local.numel():
            local.copy_(values)
        return target

    def _put(self, full: Tensor, target: Tensor, name: str) -> None:
        """Rank 0's values into a tensor that is cut, or that every rank has."""
        cut = self._cut_of(target, name)
        if cut is not None:
            cut.scatter(full, target)
        elif isinstance(target, DTensor):
            scatter(full, target)
        else:
            with torch.no_grad():
                target.copy_(self.ranks.broadcast(full.to(target) if self.is_first else torch.empty_like(target)))

    def _move_weights(self, to: str) -> None:
        self.model.to(to)


def _piece(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _cut_of_piece(tensor: Tensor) -> tuple[Any, ...]:
    """What two tensors have in common whose pieces on each rank are of the same places."""
    if isinstance(tensor, DTensor):
        return tensor.shape, tensor.device_mesh, tensor.placements
    return (tensor.shape,)
