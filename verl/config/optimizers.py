"""Rules about optimizers by name: which exist, and which train nothing here or only whole weights."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

from verl.config.checks import Problems, one_of
from verl.config.root import PPOTrainerConfig
from verl.config.sft import SFTTrainerConfig
from verl.config.validate_megatron import role_of_supervised, roles
from verl.errors import ConfigError

TORCH = "torch.optim"
NEVER = {
    "LBFGS": "it calls the loss again and again in one step",
    "Muon": "it takes matrices alone, and every model has vectors, such as the weights of its norms",
    "SparseAdam": "it takes sparse gradients alone",
}
"""Classes of torch that no role can be trained with, and why."""
WHOLE = ("Adafactor",)
"""Those that look at a weight as a whole."""
IN_PIECES = ("megatron",)
"""Backends whose processes have pieces of weights, without their shape."""
OF_MEGATRON = ("adam", "sgd")
"""Megatron's own names."""


def problems(cfg: PPOTrainerConfig) -> Problems:
    """Of every role that is trained."""
    return [problem for key, optim, strategy in _trained(cfg) for problem in of_section(key, optim, strategy)]


def sft_problems(cfg: SFTTrainerConfig) -> Problems:
    """Of a supervised run."""
    return of_section("optim", cfg.optim, role_of_supervised(cfg).section.strategy)


def of_section(key: str, optim: Any, strategy: str) -> Problems:
    """One ``optim`` section under the name of its backend."""
    name, module = optim.optimizer, optim.optimizer_impl
    if module != TORCH:
        return _module(f"{key}.optimizer_impl", module)
    own = OF_MEGATRON if strategy == "megatron" else ()
    usable = [n for n in classes() if n not in NEVER and not (strategy in IN_PIECES and n in WHOLE)]
    why = NEVER.get(name)
    if name in WHOLE and strategy in IN_PIECES:
        why = f"it looks at a weight as a whole, of which a process has a piece with strategy={strategy}"
    if why is None:
        return one_of(f"{key}.optimizer", name, [*usable, *own])
    message = f"this optimizer cannot train here: {why}"
    return [ConfigError(message, key=f"{key}.optimizer", got=name, allowed=usable, fix=f"Set {key}.optimizer=AdamW.")]


def classes() -> list[str]:
    """The optimizers of torch."""
    from torch import optim  # loaded only once there is something to validate

    made = {name: thing for name, thing in vars(optim).items() if isinstance(thing, type)}
    return sorted(name for name, thing in made.items() if issubclass(thing, optim.Optimizer) and name != "Optimizer")


def _trained(cfg: PPOTrainerConfig) -> Iterator[tuple[str, Any, str]]:
    for role in roles(cfg):
        if role.key in ("actor_rollout_ref.actor", "critic"):
            yield f"{role.key}.optim", role.section.optim, role.section.strategy


def _module(key: str, name: str) -> Problems:
    first = name.partition(".")[0]
    if first and importlib.util.find_spec(first) is not None:
        return []  # what is in it is seen where it is imported
    fix = f"Install it, or leave it out to take {TORCH}."
    return [ConfigError("no such module", key=key, got=name, fix=fix)]
