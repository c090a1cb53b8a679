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
from verl.checkpoint import EngineState, read_part, write_part
from verl.checkpoint.state import prefixed
from verl.engines.sharding import unit_modules
from verl.metrics import notice

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def own_device() -> Any:
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


def move_optimizer(optimizer: Optimizer, to: Any = "cpu") -> None:
    """The optimizer's state to a device; by default to the host."""
    for entries in optimizer.state.values():
        for key, entry in entries.items():
            if isinstance(entry, Tensor):
                entries[key] = entry.to(to)


def whole_state(model: nn.Module, optimizer: Optimizer | None) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The state of both with nothing cut, on the host of rank 0. Collective."""
    weights = get_model_state_dict(model, options=WHOLE)
    return weights, None if optimizer is None else get_optimizer_state_dict(model, optimizer, options=WHOLE)


def take_whole_state(
    model: nn.Module, optimizer: Optimizer | None, weights: dict[str, Any], state: dict[str, Any] | None
) -> None:
    """Continue from what `whole_state` gave, which every rank has."""
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))
    if optimizer is not None and state is not None:
        set_optimizer_state_dict(model, optimizer, state, options=StateDictOptions(full_state_dict=True))


class FSDPCheckpointManager:
    """Saves and loads what FSDP2 shards; a checkpoint loads at any number of processes.

    Args:
        processing_class: a tokenizer or processor, saved beside the weights.
    """

    def __init__(
        self, model: Any, optimizer: Any = None, lr_scheduler: Any = None, processing_class: Any = None, **kwargs: Any
    ):
        self.model, self.optimizer, self.lr_scheduler = model, optimizer, lr_scheduler
        self.processing_class = processing_class

    def save_checkpoint(self, local_path: str, hdfs_path: Any = None, global_step: int = 0, **kwargs: Any) -> None:
        """Write weights, optimizer and schedule into a folder. Collective."""
        weights, optimizer = whole_state(self.model, self.optimizer)
        if not dist.is_initialized() or dist.get_rank() == 0:
            tensors, scalars = (
                prefixed("model", weights),
                {"model": {}, "optimizer": {}, "extra": {"step": global_step}},
            )
            for name, entries in (optimizer or {}).get("state", {}).items():
                tensors |= prefixed(
                    f"optimizer/{name}", {key: torch.as_tensor(value) for key, value in entries.items()}
                )
            scalars["optimizer"] = {"param_groups": (optimizer or {}).get("param_groups", [])}
            if self.lr_scheduler is not None:
                scalars["extra"]["scheduler"] = int(self.lr_scheduler.last_epoch)
            write_part(Path(local_path), EngineState(tensors, scalars))
            if self.processing_class is not None:
                self.processing_class.save_pretrained(Path(local_path) / "huggingface")
        if dist.is_initialized():
            dist.barrier()  # every rank: the files are there for all of them

    def load_checkpoint(
        self, local_path: str | None, hdfs_path: Any = None, del_local_after_load: bool = False
    ) -> None:
        """Continue from what `save_checkpoint` wrote. Collective."""
        if local_path is None:
            return
        state = read_part(Path(local_path))
        entries: dict[str, dict[str, Any]] = {}
        for full_name, tensor in state.section("optimizer").items():
            name, _, key = full_name.rpartition("/")
            entries.setdefault(name, {})[key] = tensor
        kept = {"state": entries, **state.scalars["optimizer"]}
        take_whole_state(self.model, self.optimizer, dict(state.section("model")), kept if entries else None)
        epoch = state.scalars["extra"].get("scheduler")
        if self.lr_scheduler is not None and epoch is None:
            notice("lr_scheduler", f"{local_path} was saved without one: the schedule begins anew")
        elif self.lr_scheduler is not None:
            self.lr_scheduler.load_state_dict({**self.lr_scheduler.state_dict(), "last_epoch": epoch})
