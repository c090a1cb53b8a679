"""Optimizers by name, and their state as named tensors."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from verl.checkpoint.state import StateSection
from verl.config.schema.role import OptimizerConfig
from verl.engines.low_bit import narrowed, widened
from verl.errors import CheckpointError, ConfigError, suggest
from verl.registry import load_object

T = TypeVar("T")


def build_optimizer(parameters: Iterable[Any], optim: OptimizerConfig, device: str, fused: bool = True) -> Optimizer:
    """The optimizer that an ``optim`` section describes.

    Args:
        parameters: or groups of them.
        optim: optimizer (class name), optimizer_impl (its module), lr, weight_decay, betas, override_optimizer_config.
        device: torch's own Adam variants run fused on cpu and cuda: one pass over memory instead of ten.
        fused: False forbids that.

    Raises:
        ConfigError: no such module or class (the message lists the classes), or an argument it does not take.
    """
    cls = _optimizer_class(optim.optimizer_impl, optim.optimizer)
    accepted = inspect.signature(cls).parameters
    arguments: dict[str, Any] = {"lr": optim.lr}
    if "weight_decay" in accepted:
        arguments["weight_decay"] = optim.weight_decay
    if "betas" in accepted:
        arguments["betas"] = tuple(optim.betas)
    if fused and "fused" in accepted and optim.optimizer_impl == "torch.optim" and device in ("cpu", "cuda"):
        arguments["fused"] = True
    override = dict(optim.override_optimizer_config or {})
    if "fused" in override or override.get("foreach") or override.get("capturable"):
        arguments.pop("fused", None)
    _check_override(cls, override, accepted)
    return cls(list(parameters), **{**arguments, **override})


def optimizer_state(optimizer: Optimizer, names: Mapping[Any, str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state as ``{parameter}/{key}`` -> tensor, and the rest as JSON.

    Group options that the configuration sets (lr, betas, ...) belong to it and not to the state; what an optimizer
    keeps for itself in its groups is saved.
    """
    tensors: dict[str, Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    for parameter, entries in optimizer.state.items():
        for key, entry in entries.items():
            if isinstance(entry, Tensor):
                tensors[f"{names[parameter]}/{key}"] = widened(entry)
            else:
                values.setdefault(names[parameter], {})[key] = entry
    configured = inspect.signature(type(optimizer)).parameters
    groups = [_group_options(group, configured) for group in optimizer.param_groups]
    return tensors, {"class": _class_name(optimizer), "values": values, "groups": groups}


def copied(saved: StateSection, name: str, parameter: nn.Parameter, device: torch.device) -> Tensor:
    """A copy of a saved tensor on the device: what an optimizer over full parameters keeps."""
    return saved[name].detach().to(device, copy=True)


def load_optimizer_state(
    optimizer: Optimizer,
    names: Mapping[nn.Parameter, str],
    saved: StateSection,
    scalars: Mapping[str, Any],
    place: Callable[[StateSection, str, nn.Parameter, torch.device], Tensor] = copied,
) -> None:
    """Continue from what `optimizer_state` gave, bit for bit.

    Args:
        place: what was saved, the full name of a tensor in it, the parameter and a device -> what the optimizer keeps;
            a sharded backend reads its part.

    Raises:
        CheckpointError: it is the state of another optimizer, or of other parameters.
    """
    check_class(optimizer, scalars)
    by_name = {name: parameter for parameter, name in names.items()}
    for full_name in saved:
        _check_shape(saved.shape(full_name), entry_named(by_name, full_name.rpartition("/")[0]))
    for name in scalars["values"]:
        entry_named(by_name, name)
    optimizer.state.clear()  # before the new one is made: the two would take memory twice
    for full_name in saved:
        name, _, key = full_name.rpartition("/")
        parameter = by_name[name]
        device = state_device(key, parameter, optimizer)
        placed = place(saved, full_name, parameter, device)
        optimizer.state[parameter][key] = narrowed(optimizer, parameter, key, placed)
    for name, entries in scalars["values"].items():
        optimizer.state[by_name[name]].update(entries)
    take_group_options(optimizer, scalars)


def take_group_options(optimizer: Optimizer, scalars: Mapping[str, Any]) -> None:
    """What an optimizer keeps in its groups; they differ by how weights are laid out only: the first stands for all."""
    for group in optimizer.param_groups:
        group.update(scalars["groups"][0])


def check_class(optimizer: Optimizer, scalars: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` where saved scalars are those of another optimizer."""
    if scalars["class"] != _class_name(optimizer):
        raise CheckpointError(
            "the checkpoint holds the state of another optimizer", got=scalars["class"], allowed=_class_name(optimizer)
        )


def move_optimizer_state(optimizer: Optimizer, moves: Mapping[str, str]) -> None:
    """Move state tensors between kinds of device: ``{"cuda": "cpu"}``; a counter that lives on the host stays there."""
    counts_on_device = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    for entries in optimizer.state.values():
        for key, entry in entries.items():
            if isinstance(entry, Tensor) and (counts_on_device or entry.numel() > 1) and entry.device.type in moves:
                entries[key] = entry.to(moves[entry.device.type], non_blocking=True)


def _optimizer_class(module_name: str, class_name: str) -> type[Optimizer]:
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and not module_name.startswith(error.name):
            raise  # the module exists and lacks something itself: that traceback is the message
        raise ConfigError(
            "no such module", key="optimizer_impl", got=module_name, fix="Is it installed? Default: torch.optim."
        ) from error
    classes = sorted(
        name for name, thing in vars(module).items() if inspect.isclass(thing) and issubclass(thing, Optimizer)
    )
    if class_name not in classes:
        raise ConfigError(
            f"{module_name} has no such optimizer",
            key="optimizer",
            got=class_name,
            allowed=[name for name in classes if name != "Optimizer"],
            fix=suggest(class_name, classes),
        )
    return load_object(f"{module_name}:{class_name}")


def _check_override(cls: type[Optimizer], override: Mapping[str, Any], accepted: Mapping[str, Any]) -> None:
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values()):
        return
    unknown = [key for key in override if key not in accepted]
    if unknown:
        raise ConfigError(
            f"{cls.__name__} takes no such argument",
            key=f"override_optimizer_config.{unknown[0]}",
            allowed=[name for name in accepted if name not in ("self", "params")],
            fix=suggest(unknown[0], accepted),
        )


def _group_options(group: Mapping[str, Any], configured: Iterable[str]) -> dict[str, Any]:
    """What is in a group beside parameters and constructor arguments, as far as JSON can hold it."""
    skipped = {"params", "initial_lr", *configured}
    return {k: v for k, v in group.items() if k not in skipped and isinstance(v, int | float | str | bool | type(None))}


def _class_name(optimizer: Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def entry_named(by_name: Mapping[str, T], name: str) -> T:
    """What belongs to a saved name; `CheckpointError` where nothing does."""
    if name not in by_name:
        raise CheckpointError(
            "the checkpoint's optimizer state belongs to another model", got=name, fix=suggest(name, by_name)
        )
    return by_name[name]


def _check_shape(shape: torch.Size, parameter: nn.Parameter) -> None:
    if shape.numel() > 1 and shape != parameter.shape and shape.numel() == parameter.numel():
        raise CheckpointError("the checkpoint's optimizer state has another shape", got=tuple(shape))


def state_device(key: str, parameter: nn.Parameter, optimizer: Optimizer) -> torch.device:
    """Where this optimizer keeps an entry: step counters on the host unless it runs fused or captured on a device."""
    on_device = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    return torch.device("cpu") if key == "step" and not on_device else parameter.device
