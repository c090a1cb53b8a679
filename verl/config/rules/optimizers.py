"""Rules about optimizers by name: which exist, and which train nothing here or only full weights."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from verl import registry
from verl.config.machine.pools import EngineRole, roles
from verl.config.rules.checks import Problems, caught
from verl.config.schema.root import PPOTrainerConfig
from verl.config.schema.tree import one_of
from verl.errors import ConfigError, NotBuiltError, suggest
from verl.metrics import notice

if TYPE_CHECKING:
    from verl.config.schema.role import OptimizerConfig
    from verl.config.schema.sft import SupervisedConfig

TORCH = "torch.optim"
LOW_BIT = "torchao.optim"
OF_LOW_BIT = ("Adam4bit", "Adam8bit", "AdamFp8", "AdamW4bit", "AdamW8bit", "AdamWFp8")
"""Those of torchao's classes that keep moments in 4 or 8 bits; the others there need engines of their own."""
OPTIONS_OF_LOW_BIT = ("amsgrad", "block_size", "eps")
NEVER = {
    "LBFGS": "it calls the loss again and again in one step",
    "SparseAdam": "it takes sparse gradients alone",
}
"""Classes of torch that no role can be trained with, and why."""
WHOLE = {
    "Adafactor": ("megatron", "fsdp2", "torchtitan"),
    "Rprop": ("fsdp2", "torchtitan"),
    "Muon": ("torchtitan",),
}
"""Those that look at a weight as a whole, and the backends whose processes have pieces of weights only."""
WHOLE_WEIGHTS = "bitsandbytes"
"""The package whose optimizers run in one process alone."""
OF_MEGATRON = ("adam", "sgd")
"""Megatron's own names."""
_OFFLOAD = "optimizer_offload of the same section says where the state is kept"
IDLE_OF_MEGATRON = {
    "optimizer_cpu_offload": _OFFLOAD,
    "optimizer_offload_fraction": _OFFLOAD,
    "overlap_cpu_optimizer_d2h_h2d": _OFFLOAD,
    "fp8_recipe": "no weight of the optimizer is in FP8",
    "use_precision_aware_optimizer": "weights and moments are float32 in the optimizer",
}
"""Fields of Megatron's OptimizerConfig that change no number of the update, and why each has no effect here."""


def problems(cfg: PPOTrainerConfig | SupervisedConfig) -> Problems:
    """Of every model that is trained."""
    return [p for key, optim, role in _trained(cfg) for p in of_section(key, optim, _backend(role))]


def missing(cfg: PPOTrainerConfig | SupervisedConfig) -> Problems:
    """Classes of other modules than torch's that this machine does not have."""
    return [p for key, optim, _ in _trained(cfg) for p in _elsewhere(key, optim)]


def of_section(key: str, optim: OptimizerConfig, backend: str) -> Problems:
    """One ``optim`` section under the name of its backend: plain, fsdp2, megatron or torchtitan."""
    name = optim.optimizer
    if optim.optimizer_impl == LOW_BIT:
        return _low_bit(key, optim, backend)
    if optim.optimizer_impl.partition(".")[0] == WHOLE_WEIGHTS and backend != "plain":
        message, fix = "its kernels take whole weights, of which each process has a piece", "torchao.optim shards."
        return [ConfigError(message, key=f"{key}.optimizer_impl", got=optim.optimizer_impl, fix=fix)]
    if optim.optimizer_impl != TORCH:
        return []
    extra = OF_MEGATRON if backend == "megatron" else ()
    usable = [n for n in classes() if n not in NEVER and backend not in WHOLE.get(n, ())]
    why = NEVER.get(name)
    if backend in WHOLE.get(name, ()):
        why = f"it looks at a weight as a whole, of which a process has a piece with strategy={backend}"
    if why is None:
        return one_of(f"{key}.optimizer", name, [*usable, *extra]) or _arguments(key, optim, backend)
    message = f"this optimizer cannot train here: {why}"
    return [ConfigError(message, key=f"{key}.optimizer", got=name, allowed=usable, fix=f"Set {key}.optimizer=AdamW.")]


def _low_bit(key: str, optim: Any, backend: str) -> Problems:
    """Torchao's optimizers: where moments are laid out as the weights are, and with arguments that were tried."""
    if backend not in ("plain", "fsdp2"):
        message, fix = f"moments in few bits are not built yet with strategy={backend}", "Set strategy=fsdp2."
        fix = f"{fix[:-1]}, or {key}.optimizer_impl={TORCH} {key}.optimizer=AdamW."
        return [NotBuiltError(message, key=f"{key}.optimizer_impl", got=LOW_BIT, fix=fix)]
    wrong = one_of(f"{key}.optimizer", optim.optimizer, OF_LOW_BIT)
    for name in optim.override_optimizer_config or {}:
        if name not in OPTIONS_OF_LOW_BIT:
            full, fix = f"{key}.override_optimizer_config.{name}", suggest(name, OPTIONS_OF_LOW_BIT)
            message = f"{optim.optimizer} takes no such argument here"
            wrong.append(ConfigError(message, key=full, allowed=OPTIONS_OF_LOW_BIT, fix=fix))
    return wrong


def _elsewhere(key: str, optim: Any) -> Problems:
    """A class that the module does not have; the module is loaded, as the workers will."""
    name, module = optim.optimizer, optim.optimizer_impl
    wrong = [] if module == TORCH else _module(f"{key}.optimizer_impl", module)
    if wrong or module == TORCH:
        return wrong
    unknown = caught(registry.load_object, f"{module}:{name}")
    return [ConfigError(p.message, key=f"{key}.optimizer", got=name, fix=p.fix) for p in unknown]


def for_megatron(optim: OptimizerConfig) -> Any:
    """The section without the fields that have no effect there."""
    arguments = optim.override_optimizer_config or {}
    usable = {name: value for name, value in arguments.items() if name not in IDLE_OF_MEGATRON}
    return replace(optim, override_optimizer_config=usable) if len(usable) < len(arguments) else optim


def _arguments(key: str, optim: Any, backend: str) -> Problems:
    """Arguments of one's own that the class does not take; of Megatron's own fields one notice."""
    from torch import optim as of_torch  # loaded only once there is something to validate

    idle = [name for name in optim.override_optimizer_config or {} if name in IDLE_OF_MEGATRON]
    if backend == "megatron" and idle:
        reasons = "; ".join(f"{name} ({IDLE_OF_MEGATRON[name]})" for name in idle)
        notice(f"{key}.override_optimizer_config", f"these fields have no effect: {reasons}")
        optim = for_megatron(optim)
    made = getattr(of_torch, optim.optimizer, None)  # None: a name of Megatron's own
    accepted = list(inspect.signature(made).parameters) if made is not None else []
    unknown = [name for name in optim.override_optimizer_config or {} if accepted and name not in accepted]
    if not unknown:
        return []
    name, allowed = unknown[0], accepted[1:]
    full = f"{key}.override_optimizer_config.{name}"
    return [
        ConfigError(f"{optim.optimizer} takes no such argument", key=full, allowed=allowed, fix=suggest(name, allowed))
    ]


def classes() -> list[str]:
    """The optimizers of torch."""
    from torch import optim  # loaded only once there is something to validate

    made = {name: thing for name, thing in vars(optim).items() if isinstance(thing, type)}
    return sorted(name for name, thing in made.items() if issubclass(thing, optim.Optimizer) and name != "Optimizer")


def _trained(cfg: PPOTrainerConfig | SupervisedConfig) -> Iterator[tuple[str, OptimizerConfig, EngineRole]]:
    """Key and section of each optimizer, and the model that it trains."""
    for role in roles(cfg):
        if not isinstance(cfg, PPOTrainerConfig):
            yield "optim", cfg.optim, role
        elif role.key in ("actor_rollout_ref.actor", "critic"):
            yield f"{role.key}.optim", role.section.optim, role


def _backend(role: EngineRole) -> str:
    """That of `topology.backend_of`, without its notice; the weights of one process are never in pieces."""
    named = role.section.strategy
    if role.has_own_sizes:
        return named
    return "plain" if role.processes == 1 or named == "plain" else "fsdp2"


def _module(key: str, name: str) -> Problems:
    first = name.partition(".")[0]
    if first and importlib.util.find_spec(first) is not None:
        return []
    fix = f"Install it, or leave it out to take {TORCH}."
    return [ConfigError("no such module", key=key, got=name, fix=fix)]
