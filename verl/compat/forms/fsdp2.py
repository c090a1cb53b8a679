"""FSDP2 for code that brings its own module and optimizer: sharding, loading, clipping, moving, saving.

The engines do all this themselves (`verl.engines.fsdp2`); nothing in the library calls these forms.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from verl import device
from verl.checkpoint import EngineState, prepare_part, read_part, write_part
from verl.checkpoint.state import StateSection, prefixed
from verl.checkpoint.tensors import write_tensors
from verl.distributed import Ranks
from verl.distributed.boxes import written_once
from verl.distributed.shards import local_box
from verl.engines.saving import held, weights_to_write
from verl.engines.sharding import unit_modules
from verl.errors import CheckpointError
from verl.metrics import notice


def own_device() -> int | str:
    """What ``tensor.to`` takes for this process's device."""
    return torch.get_device_module(device.resolve_device(None)).current_device()


def fsdp_version(model: nn.Module) -> int:
    """1, 2, or 0 for a module that is not sharded."""
    if isinstance(model, FullyShardedDataParallel):
        return 1
    return 2 if isinstance(model, FSDPModule) else 0


def init_weights_on_first(use_meta_tensor: bool = True, mesh: Any = None) -> Callable[[], AbstractContextManager[Any]]:
    """A context in which rank 0 makes a model with values and the others one without; ``mesh``: rank 0 of it."""
    from accelerate import init_empty_weights

    rank = mesh.get_coordinate()[-1] if mesh is not None else dist.get_rank() if dist.is_initialized() else 0
    return init_empty_weights if use_meta_tensor and rank != 0 else nullcontext


def empty_off_first(module: nn.Module) -> nn.Module:
    """As ``param_init_fn``: memory without values on every rank but the first."""
    return module if dist.get_rank() == 0 else module.to_empty(device=own_device(), recurse=False)


def wrap_policy(module: nn.Module, config: Any = None, is_lora: bool = False) -> Callable[..., bool]:
    """FSDP1's ``auto_wrap_policy`` for the units that the engines would make of this module."""
    size = int((config or {}).get("min_num_params", 0) or 0)
    if size > 0:
        return functools.partial(size_based_auto_wrap_policy, min_num_params=size)
    layers = {type(unit) for _, unit in unit_modules(module)}
    return functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=layers)


def shard_model(model: nn.Module, fsdp_kwargs: Mapping[str, Any], config: Any = None) -> None:
    """`fully_shard` on every unit of the model, then on the model."""
    size = int(((config or {}).get("wrap_policy") or {}).get("min_num_params", 0) or 0)
    for _, unit in unit_modules(model, size):
        fully_shard(unit, **fsdp_kwargs)
    fully_shard(model, **fsdp_kwargs)


def shard_largest(size: int) -> Callable[[nn.Parameter], Shard]:
    """A ``shard_placement_fn``: the longest dimension that ``size`` divides, else the first."""

    def place(parameter: nn.Parameter) -> Shard:
        fitting = [dim for dim, length in enumerate(parameter.shape) if length % size == 0]
        return Shard(max(fitting, key=lambda dim: parameter.shape[dim], default=0))

    return place


def load_whole(model: nn.Module, full_state: dict[str, Any], device_mesh: Any = None, cpu_offload: Any = None) -> None:
    """Give a sharded model the weights that rank 0 has. Collective."""
    first = not dist.is_initialized() or dist.get_rank() == 0
    model.to(own_device()) if first else model.to_empty(device=own_device())
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=bool(cpu_offload))
    set_model_state_dict(model, full_state, options=options)
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)  # all ranks, in the model's order
    if cpu_offload:
        model.to("cpu")


def clip_gradients(
    parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2.0, **options: Any
) -> Tensor:
    """As ``torch.nn.utils.clip_grad_norm_`` over sharded parameters; the norm of the whole gradient. Collective."""
    norm = nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, **options)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def move_model_to_host(model: nn.Module, empty_cache: bool = True) -> None:
    """Weights to the host."""
    model.to("cpu")
    if empty_cache:
        device.give_memory_back(device.resolve_device(None))


def move_model_back(model: nn.Module) -> None:
    """Weights to this process's device."""
    model.to(own_device())


def move_optimizer(optimizer: Optimizer, to: str = "cpu") -> None:
    """The optimizer's state to a device; by default to the host."""
    for entries in optimizer.state.values():
        for key, entry in entries.items():
            if isinstance(entry, Tensor):
                entries[key] = entry.to(to)


def state_of(model: nn.Module, optimizer: Optimizer | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Weights and optimizer state by name, as this rank has them: nothing is gathered. Without an optimizer: empty."""
    return get_model_state_dict(model), {} if optimizer is None else get_optimizer_state_dict(model, optimizer)


def fill(saved: StateSection, targets: Mapping[str, Any]) -> dict[str, Any]:
    """Copy this rank's boxes of saved tensors into its own; what is no tensor comes back as it was saved.

    Raises:
        CheckpointError: a tensor was not saved, or with another shape, or there is none for a saved one; nothing is
            copied then.
    """
    extra = sorted(set(saved) ^ set(targets))
    if extra:
        raise CheckpointError(f"the checkpoint is of another model or optimizer: {extra[0]} is in one of the two only")
    tensors = {name: target for name, target in targets.items() if isinstance(target, Tensor)}
    for name, target in tensors.items():
        if saved.shape(name) != target.shape:
            raise CheckpointError(
                f"{name} has another shape", got=list(saved.shape(name)), allowed=str([*target.shape])
            )
    for name, target in tensors.items():
        spec, local = local_box(target)
        local.copy_(saved.box(name, spec.bounds))
    return {name: type(value)(saved[name].item()) for name, value in targets.items() if name not in tensors}


class FSDPCheckpointManager:
    """Saves and loads what FSDP2 shards; a checkpoint loads at any number of processes.

    Args:
        processing_class: a tokenizer or processor, saved next to the weights.
    """

    def __init__(
        self, model: Any, optimizer: Any = None, lr_scheduler: Any = None, processing_class: Any = None, **kwargs: Any
    ):
        self.model, self.optimizer, self.lr_scheduler = model, optimizer, lr_scheduler
        self.processing_class = processing_class

    def save_checkpoint(self, local_path: str, hdfs_path: Any = None, global_step: int = 0, **kwargs: Any) -> None:
        """Write weights, optimizer and schedule into a folder, every rank its part. Collective."""
        ranks, folder = _ranks(), Path(local_path)
        weights, optimizer = state_of(self.model, self.optimizer)
        written = weights_to_write(held({name: local_box(t) for name, t in weights.items()}), ranks, dict)
        tensors, shards = prefixed("model", written.tensors), {}
        entries = {name: torch.as_tensor(value) for name, value in _by_name(optimizer.get("state", {})).items()}
        for name, (spec, tensor) in written_once(held({n: local_box(t) for n, t in entries.items()}), ranks).items():
            tensors[f"optimizer/{name}"], shards[f"optimizer/{name}"] = tensor, spec
        scalars: dict[str, Any] = {"model": {}, "extra": {"step": global_step}}
        scalars["optimizer"] = {"param_groups": optimizer.get("param_groups", [])}
        if self.lr_scheduler is not None:
            scalars["extra"]["scheduler"] = int(self.lr_scheduler.last_epoch)
        state = EngineState(tensors, scalars, shards, ranks.rank, ranks.size, written.files)
        ranks.only_first(lambda: prepare_part(folder))
        ranks.together(lambda: (write_part(folder, state, hf=self._write_rest), None))

    def _write_rest(self, folder: Path, weights: Iterable[tuple[str, Tensor]] | None) -> None:
        """The files next to the weights, and on one rank the weights."""
        folder.mkdir(parents=True, exist_ok=True)
        if weights is not None:
            write_tensors(folder / "model.safetensors", dict(weights))
        if self.processing_class is not None:
            self.processing_class.save_pretrained(folder)

    def load_checkpoint(
        self, local_path: str | None, hdfs_path: Any = None, del_local_after_load: bool = False
    ) -> None:
        """Continue from what `save_checkpoint` wrote, of which every rank reads what it keeps. Collective.

        Raises:
            CheckpointError: it is of another model or optimizer.
        """
        if local_path is None:
            return
        state, _ = _ranks().together(lambda: (read_part(Path(local_path)), None))
        weights, optimizer_state = state_of(self.model, self.optimizer)
        saved = state.section("optimizer")
        _ranks().together(lambda: (fill(state.section("model"), weights), None))  # in place: they are the model's
        if optimizer_state and saved:
            optimizer_state |= state.scalars["optimizer"]
            values, _ = _ranks().together(lambda: (fill(saved, _by_name(optimizer_state["state"])), None))
            for full, value in values.items():
                name, _, key = full.rpartition("/")
                optimizer_state["state"][name][key] = value
            set_optimizer_state_dict(self.model, self.optimizer, optimizer_state)
        epoch = state.scalars["extra"].get("scheduler")
        if self.lr_scheduler is not None and epoch is None:
            notice("lr_scheduler", f"{local_path} was saved without one: the schedule starts from scratch")
        elif self.lr_scheduler is not None:
            self.lr_scheduler.load_state_dict({**self.lr_scheduler.state_dict(), "last_epoch": epoch})


def _ranks() -> Ranks:
    return Ranks.of_world() if dist.is_initialized() else Ranks()


def _by_name(state: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """``parameter/key`` -> entry of an optimizer's state."""
    return {f"{name}/{key}": value for name, entries in state.items() for key, value in entries.items()}
