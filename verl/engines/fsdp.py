"""FSDP in its first form (`FullyShardedDataParallel`): each unit's weights are one flat tensor, cut into equal pieces.

Pieces carry no names, so whatever goes in or out under names goes through a unit that is gathered for the moment:
weights, and the optimizer's tensors lent to the weights' places, since they are laid out alike.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Container, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import CustomPolicy

from verl.engines import sharding
from verl.engines.flat_state import FlatState
from verl.engines.sharded_engine import ShardedEngine
from verl.engines.sharded_optimizer import build_flat_optimizer
from verl.errors import NotBuiltError
from verl.metrics import notice
from verl.models.stored import StoredWeights
from verl.models.weights import named_tensors


@dataclass(frozen=True)
class Slot:
    """Where a weight shows while its unit is gathered."""

    name: str
    holder: nn.Module
    attribute: str

    @property
    def tensor(self) -> Tensor:
        found = getattr(self.holder, self.attribute)
        assert isinstance(found, Tensor), f"{self.name} is no tensor"
        return found


class FSDPEngine(ShardedEngine):
    """See `ShardedEngine`.

    With use_orig_params the optimizer sees the original parameters (pieces of them) instead of one flat one per unit;
    what it computes is the same. With offload_policy gradients are reduced once per optimizer step, because FSDP does
    not accumulate reduced gradients on the host.
    """

    def _build(self, model: Any, engine: Any, seed: int) -> nn.Module:
        if engine.tensor_parallel_size > 1:
            raise NotBuiltError(
                "linear maps are shared among processes with strategy=fsdp2 only",
                key="tensor_parallel_size",
                got=engine.tensor_parallel_size,
                fix="Set strategy=fsdp2.",
            )
        return super()._build(model, engine, seed)

    def _cut(self, model: Any) -> nn.Module:
        layout = self.layout
        units = dict(sharding.unit_modules(model, layout.min_num_params))
        self.cuts, experts = ({}, {}) if self.experts is None else self.experts.cut(model)
        units |= experts
        self.slots = _slots(model, list(units))
        self.names = _names(model)
        self.silence = ExitStack()
        offload = layout.offload and layout.device != "cpu"
        if layout.offload and not offload:
            notice(layout.offload_key, "has no effect with strategy=fsdp on a CPU: weights live there anyway")
        if offload and not self.sync_once:
            notice(layout.offload_key, "with strategy=fsdp gradients are reduced once per optimizer step")
            self.sync_once = True
        chosen: dict[nn.Module, Any] = dict.fromkeys(units.values(), True)
        if self.experts is not None:
            chosen |= dict.fromkeys(experts.values(), _strategy(replace(layout, mesh=self.experts.mesh)))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*NO_SHARD.*")
            warnings.filterwarnings("ignore", message=".*has both parameters with requires_grad.*")  # see docs/fsdp.md
            whole = FullyShardedDataParallel(
                model,
                auto_wrap_policy=CustomPolicy(lambda module: chosen.get(module, False)),
                cpu_offload=CPUOffload(offload_params=True) if offload else None,
                mixed_precision=MixedPrecision(param_dtype=layout.dtype, reduce_dtype=torch.float32),
                backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
                forward_prefetch=layout.prefetch,
                param_init_fn=_Empty(layout.device),
                device_id=_device(layout.device),
                use_orig_params=layout.original_parameters,
                **_strategy(layout),
            )
        wrapped = {unit.module: unit for unit in FullyShardedDataParallel.fsdp_modules(whole)}
        self.units = {"": whole, **{name: wrapped[module] for name, module in units.items()}}
        with self._gathered("", write=False):
            return whole  # gathered once, so that FSDP knows which of them is the root

    def _keeps_parameters(self) -> bool:
        return False  # of a flat weight they see views

    def _held(self) -> str:
        own = sum(p.nbytes for p in self.model.parameters())
        whole = sum(t.numel() * t.element_size() for t in named_tensors(self.blueprint).values())
        return f"{own} of {whole} bytes of weights; a forward pass gathers them in {len(self.units)} steps"

    def _build_optimizer(self, parameters: list[nn.Parameter], optim: Any) -> torch.optim.Optimizer:
        return build_flat_optimizer(parameters, optim, self.layout.home)

    # ---- passes ------------------------------------------------------------------------------------------------

    def _before_micro_batch(self, last: bool) -> None:
        self.silence.close()
        if self.sync_once and not last:
            self.silence.enter_context(self.model.no_sync())

    def _after_passes(self) -> None:
        """Free what a forward pass without a backward one left gathered."""
        self.silence.close()
        for handle in (unit._handle for unit in self.units.values()):
            if handle is not None and handle.uses_sharded_strategy:
                handle.reshard(True)

    # ---- weights -----------------------------------------------------------------------------------------------

    def _units(self, first_only: bool, only: Container[str] | None = None) -> Iterator[dict[str, Tensor]]:
        wanted = [(prefix, [s for s in slots if only is None or s.name in only]) for prefix, slots in self.slots]
        with self._on_device():
            for prefix, slots in ((prefix, slots) for prefix, slots in wanted if slots):
                with self._gathered(prefix, write=False):
                    whole = {s.name: self._joined(s) for s in slots}
                    if first_only:
                        found = {name: t.to("cpu", copy=True) for name, t in whole.items() if self.is_first}
                    else:
                        found = {name: t.clone() for name, t in whole.items()}
                yield found

    @torch.no_grad()
    def _take(self, stored: StoredWeights) -> None:
        for flat in (unit._handle.flat_param for unit in self.units.values() if unit._handle is not None):
            places: Any = zip(flat._param_infos, flat._shapes, flat._shard_param_infos)
            for info, shape, found in places:
                if found.in_shard:
                    name, width = self.names[info.module, info.param_name], shape[1:].numel()
                    start, end = found.intra_param_start_idx, found.intra_param_end_idx + 1
                    rows = self._rows(stored, name, start // width, -(-end // width)).flatten()
                    piece = flat.data.narrow(0, found.offset_in_shard, found.numel_in_shard)
                    piece.copy_(rows.narrow(0, start % width, end - start))
        for slot in (slot for _, slots in self.slots for slot in slots):
            if (slot.holder, slot.attribute) not in self.names:  # a buffer, which every rank has whole
                slot.tensor.copy_(self._rows(stored, slot.name, 0, len(slot.tensor)))

    def _write(self, values: Mapping[str, Tensor]) -> None:
        """As `ShardedEngine._write`, for some or all weights."""
        with self._on_device(), torch.no_grad():
            for prefix, slots in self.slots:
                with self._gathered(prefix, write=True):
                    for slot in (s for s in slots if s.name in values):
                        self._put(values[slot.name], slot)

    def _joined(self, slot: Slot) -> Tensor:
        """A gathered weight, with the parts that neighbours have."""
        cut, own = self.cuts.get(slot.name), slot.tensor.detach()
        return own if cut is None else cut.gathered(own)

    def _put(self, whole: Tensor, slot: Slot) -> None:
        """Rank 0's values into a gathered weight."""
        cut, target = self.cuts.get(slot.name), slot.tensor
        if cut is not None:
            cut.scatter(whole, target)
        else:
            given = whole.to(target) if self.is_first else torch.empty_like(target)
            target.copy_(self.ranks.broadcast(given.contiguous()))

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """Pieces that wait on the host come to the device for the moment, because units are gathered there."""
        away = next(self.model.parameters()).device.type != self.device
        self.onload(optimizer=False)
        yield
        if away:
            self.offload(optimizer=False)

    def _gathered(self, prefix: str, write: bool) -> Any:
        """A unit's whole weights, on every rank, for the moment; each keeps its piece of what is written."""
        return FullyShardedDataParallel.summon_full_params(self.units[prefix], recurse=False, writeback=write)

    def _move_weights(self, to: str) -> None:
        device = torch.device("cpu") if to == "cpu" else _device(to)
        for handle in (unit._handle for unit in self.units.values()):
            if handle is not None:
                handle.flat_param_to(device)
                handle.flat_param._local_shard = handle.flat_param.data  # what FSDP itself keeps the piece under

    # ---- optimizer ---------------------------------------------------------------------------------------------

    def _optimizer_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return self._flat_state().save(lambda: self._units(first_only=True))

    def _load_optimizer_state(self, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any]) -> None:
        self._flat_state().load(tensors, scalars, self._write)

    def _flat_state(self) -> FlatState:
        assert self.optimizer is not None, "a frozen engine has no optimizer state"
        shapes = {name: p.shape for name, p in self.blueprint.named_parameters() if p.requires_grad}
        return FlatState(self.optimizer, shapes, self.ranks)


class _Empty:
    """Gives modules without values memory; weights that are tied stay so."""

    def __init__(self, device: str):
        self.device, self.made = _device(device), dict[Tensor, nn.Parameter]()

    def __call__(self, module: nn.Module) -> None:
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                if parameter not in self.made:
                    value = torch.empty_like(parameter, device=self.device)
                    self.made[parameter] = nn.Parameter(value, requires_grad=parameter.requires_grad)
                module._parameters[name] = self.made[parameter]
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=self.device)


def _slots(model: nn.Module, unit_names: list[str]) -> list[tuple[str, list[Slot]]]:
    """Where the weights of each unit are, in the model's order; the root's come in several parts."""

    def slot(name: str) -> Slot:
        holder, _, attribute = name.rpartition(".")
        return Slot(name, model.get_submodule(holder), attribute)

    names = itertools.groupby(named_tensors(model), key=lambda name: sharding.unit_of(name, unit_names))
    return [(prefix, [slot(name) for name in group]) for prefix, group in names]


def _names(model: nn.Module) -> dict[tuple[nn.Module, str], str]:
    """Of each parameter, by the module that holds it and what it is called there; a tied one has one name."""
    first = {id(tensor): name for name, tensor in named_tensors(model).items()}
    return {
        (module, attribute): first[id(parameter)]
        for module in model.modules()
        for attribute, parameter in module._parameters.items()
        if parameter is not None
    }


def _strategy(layout: sharding.Layout) -> dict[str, Any]:
    """Of whom the pieces are, and whether they are freed between forward and backward pass."""
    freed, mesh = layout.reshard_after_forward, layout.mesh
    if mesh.size() == 1:  # one process, or one that has its experts for itself
        return {"sharding_strategy": ShardingStrategy.NO_SHARD, "process_group": mesh.get_group(), "device_mesh": None}
    if mesh.size(mesh.ndim - 1) == 1:
        return {"sharding_strategy": ShardingStrategy.NO_SHARD}
    if mesh.ndim == 2:
        kind = ShardingStrategy.HYBRID_SHARD if freed else ShardingStrategy._HYBRID_SHARD_ZERO2
    else:
        kind = ShardingStrategy.FULL_SHARD if freed else ShardingStrategy.SHARD_GRAD_OP
    return {"sharding_strategy": kind, "device_mesh": mesh}


def _device(kind: str) -> torch.device:
    """This process's own device of a kind."""
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device(kind, torch.get_device_module(kind).current_device())
