"""Rules about ``strategy=torchtitan``: sizes against processes and models, what is not built, what has no effect.

They run before anything is allocated; the engine checks again what it is given.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from typing import Any

from verl.config.checks import Problems, in_range, one_of
from verl.config.config_json import facts_of
from verl.config.node import was_typed
from verl.config.preference import DPOTrainerConfig, RMTrainerConfig
from verl.config.root import PPOTrainerConfig, learns_from_pairs
from verl.config.sft import SFTTrainerConfig
from verl.config.torchtitan import FAMILIES, INSTALL, LIKE_ENGINE, NAME, NEEDED, NOT_BUILT, VERSION, features_not_built
from verl.config.validate_megatron import MegatronRole, role_of_supervised, roles, set_names, tell_names
from verl.errors import ConfigError, NotBuiltError
from verl.metrics import notice

_T, _COPIES = "tensor_parallel_size", "data_parallel_replicate_size"
_DTYPES = ("auto", "fp32", "float32", "bf16", "bfloat16")
_ACTOR = "actor_rollout_ref.actor"
_INSTEAD = "or set {}.strategy=fsdp2."


def is_chosen(role: MegatronRole) -> bool:
    """Whether a role runs on TorchTitan."""
    return role.section.strategy == NAME


def problems(cfg: PPOTrainerConfig) -> Problems:
    """What is wrong with the roles on TorchTitan; without one nothing is."""
    wrong = [problem for role in roles(cfg) if is_chosen(role) for problem in _of_role(role)]
    if cfg.actor_rollout_ref.actor.strategy == NAME and learns_from_pairs(cfg):
        wrong.append(_not_built(f"{_ACTOR}.policy_loss.loss_mode", "a loss on pairs", _ACTOR))
    return wrong


def supervised_problems(cfg: SFTTrainerConfig) -> Problems:
    """The same for a supervised run, whose processes torchrun starts."""
    role = role_of_supervised(cfg)
    if not is_chosen(role):
        return []
    if isinstance(cfg, (DPOTrainerConfig, RMTrainerConfig)):
        return [_not_built("engine.strategy", "training on pairs of answers", "engine")]
    return _of_role(role)


def missing_or_other(key: str) -> Problems:
    """TorchTitan, or a package that it needs, is not installed, or the engine was written for another version."""
    for package in NEEDED:
        if importlib.util.find_spec(package) is None:
            message = f"TorchTitan is not installed ({package} is missing)"
            fix = f"{INSTALL} (without --no-deps it wants older datasets), or set {key}=fsdp2."
            return [ConfigError(message, key=key, got=NAME, fix=fix)]
    try:
        version = importlib.metadata.version(NAME)
    except importlib.metadata.PackageNotFoundError:
        return []  # a checkout on the path: the engine says whether it can use it
    if version.startswith(VERSION):
        return []
    message = "the engine was written for another version of TorchTitan"
    return [ConfigError(message, key=key, got=f"{NAME} {version}", allowed=f"{VERSION}x", fix=INSTALL)]


def _of_role(role: MegatronRole) -> Problems:
    if "torchtitan" not in role.section:
        return [_not_built(f"{role.key}.strategy", "a value model", role.key)]
    section, wrong = role.section.torchtitan, [*_numbers(role), *_features(role)]
    wrong += [
        NotBuiltError(
            "this parallelism is not built yet on TorchTitan's models",
            key=_key(role, name),
            got=section[name],
            allowed=[1],
            fix=f"Set it to 1 and share weights by {_T}, or set {role.key}.strategy=megatron.",
        )
        for name in NOT_BUILT
        if section[name] > 1
    ]
    return wrong or [*_processes(role), *_model(role)]


def _numbers(role: MegatronRole) -> Problems:
    section, wrong = role.section.torchtitan, []
    for name in (_T, _COPIES, *NOT_BUILT):
        wrong += in_range(_key(role, name), section[name], "1 or more", section[name] >= 1)
    return wrong + one_of(_key(role, "dtype"), section.dtype.removeprefix("torch."), _DTYPES)


def _features(role: MegatronRole) -> Problems:
    """What of a model's own settings its engine does not have."""
    return [
        _not_built(f"{role.model_key}.{name}", what, role.key) for name, what in features_not_built(role.model).items()
    ]


def _processes(role: MegatronRole) -> Problems:
    """Copies of the weights x tensor-parallel ranks divide the processes; other sizes say what is left."""
    section, world = role.section.torchtitan, role.processes
    tensor, copies = section[_T], section[_COPIES]
    if world % (tensor * copies):
        products = [f"{t} x {c}" for t in range(1, world + 1) for c in range(1, world + 1) if world % (t * c) == 0]
        name = _COPIES if world % tensor == 0 else _T
        return [
            ConfigError(
                f"{world} process(es) cannot be cut into {copies} copies of the weights x {tensor} (tensor)",
                key=_key(role, name),
                got=section[name],
                allowed=f"tensor x copies of {', '.join(products[:16])}",
                fix=f"Change the sizes, or {role.started}.",
            )
        ]
    left = {"data_parallel_size": world // tensor, "data_parallel_shard_size": world // (tensor * copies)}
    return [
        ConfigError(
            f"the other sizes leave {size} of {world} process(es)",
            key=_key(role, name),
            got=section[name],
            allowed=[size, -1],
            fix="Leave it out.",
        )
        for name, size in left.items()
        if was_typed(section, name) and section[name] not in (size, -1)
    ]


def _model(role: MegatronRole) -> Problems:
    """What the model's config.json says: a family that is there, and heads that divide evenly."""
    facts = facts_of(role.path)
    if facts is None:
        return []
    family = facts.get("model_type")
    if family is not None and family not in FAMILIES:
        return [_not_built(f"{role.model_key}.path", f"a model of the type {family!r}", role.key, FAMILIES)]
    size, heads = role.section.torchtitan[_T], facts.get("num_attention_heads")
    for count, what in ((heads, "attention heads"), (facts.get("num_key_value_heads", heads), "KV heads")):
        if isinstance(count, int) and count > 0 and count % size:
            message = f"the model's {count} {what} cannot be split evenly over {size}"
            allowed = [n for n in range(1, count + 1) if count % n == 0]
            return [ConfigError(message, key=_key(role, _T), got=size, allowed=allowed, fix="Set it to one of these.")]
    return []


def _not_built(key: str, what: str, role: str, allowed: Any = None) -> NotBuiltError:
    message = f"{what} is not built yet on TorchTitan's models"
    return NotBuiltError(
        message, key=key, allowed=allowed and list(allowed), fix=f"Leave it out, {_INSTEAD.format(role)}"
    )


def _key(role: MegatronRole, name: str) -> str:
    return f"{role.key}.torchtitan.{name}"


# ---- notices -------------------------------------------------------------------------------------------------------


def tell(cfg: PPOTrainerConfig) -> None:
    """One notice per role for what its backend does not read."""
    for role in roles(cfg):
        key, fsdp = role.others
        if is_chosen(role):
            why = f"has no effect with {role.key}.strategy=torchtitan: its settings are {role.key}.torchtitan"
            tell_names(key, set_names(fsdp), why)
            _tell_model(role)
        elif "torchtitan" in role.section:
            why = f"has no effect without {role.key}.strategy=torchtitan"
            tell_names(f"{role.key}.torchtitan", set_names(role.section.torchtitan), why)
    actor = cfg.actor_rollout_ref.actor
    if actor.strategy != NAME:
        return
    for name in ("use_torch_compile", "entropy_checkpointing", "entropy_from_logits_with_chunking"):
        if was_typed(actor, name) and actor[name]:
            notice(
                f"{_ACTOR}.{name}", f"has no effect with {_ACTOR}.strategy=torchtitan: {_ACTOR}.torchtitan.{name} has"
            )


def tell_supervised(cfg: SFTTrainerConfig) -> None:
    """The same for a supervised run."""
    role = role_of_supervised(cfg)
    if not is_chosen(role):
        names = [name for name in set_names(cfg.engine.torchtitan) if name not in LIKE_ENGINE]
        tell_names("engine.torchtitan", names, "has no effect without engine.strategy=torchtitan")
        return
    others = ("strategy", "megatron", NAME)
    own = [n for n in set_names(cfg.engine) if n not in LIKE_ENGINE and not n.startswith(others)]
    tell_names("engine", own, "has no effect with engine.strategy=torchtitan: its settings are engine.torchtitan")
    _tell_model(role)


def _tell_model(role: MegatronRole) -> None:
    if role.model is not None and (role.model.override_config or {}).get("attn_implementation"):
        key = f"{role.model_key}.override_config.attn_implementation"
        notice(key, f"has no effect with {role.key}.strategy=torchtitan, whose attention is that of packed rows")
