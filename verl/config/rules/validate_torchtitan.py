"""Rules about ``strategy=torchtitan``: sizes against processes and models, what is not built, what has no effect.

They run before anything is allocated; the engine checks again what it is given.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
from typing import TYPE_CHECKING, Any

from verl.config.machine.config_json import experts_of, facts_of
from verl.config.machine.pools import EngineRole, role_of_supervised, roles
from verl.config.rules.checks import Problems, divisors_of, uneven
from verl.config.schema.node import was_typed
from verl.config.schema.root import PPOTrainerConfig, learns_from_pairs
from verl.config.schema.torchtitan import (
    COPIES,
    EXPERTS,
    FAMILIES,
    INSTALL,
    NAME,
    NEEDED,
    SIZES,
    VERSION,
    features_not_built,
)
from verl.config.schema.tree import one_of
from verl.errors import ConfigError, NotBuiltError
from verl.metrics import notice

if TYPE_CHECKING:
    from verl.config.schema.sft import SupervisedConfig

_DTYPES = ("auto", "fp32", "float32", "bf16", "bfloat16")
_ACTOR = "actor_rollout_ref.actor"
_INSTEAD = "or set {}.strategy=fsdp2."


def is_chosen(role: EngineRole) -> bool:
    """Whether a role runs on TorchTitan."""
    return role.section.strategy == NAME


def problems(cfg: PPOTrainerConfig) -> Problems:
    """What is wrong with the roles on TorchTitan; without one nothing is."""
    wrong = [problem for role in roles(cfg) if is_chosen(role) for problem in _of_role(role)]
    if cfg.actor_rollout_ref.actor.strategy == NAME and learns_from_pairs(cfg):
        wrong.append(_not_built(f"{_ACTOR}.policy_loss.loss_mode", "a loss on pairs", _ACTOR))
    if cfg.actor_rollout_ref.actor.strategy == NAME and cfg.actor_rollout_ref.actor.router_replay.mode != "disabled":
        wrong.append(_not_built(f"{_ACTOR}.router_replay.mode", "replaying experts", _ACTOR))
    return wrong


def supervised_problems(cfg: SupervisedConfig) -> Problems:
    """The same for a supervised run, whose processes torchrun starts."""
    role = role_of_supervised(cfg)
    if not is_chosen(role):
        return []
    if "chosen_key" in cfg.data:
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


def _of_role(role: EngineRole) -> Problems:
    if "torchtitan" not in role.section:
        return [_not_built(f"{role.key}.strategy", "a value model", role.key)]
    section = role.section.torchtitan
    if any(section[name] < 1 for name in (*SIZES, COPIES, EXPERTS)):
        return []  # refused at the settings
    wrong = one_of(_key(role, "dtype"), section.dtype.removeprefix("torch."), _DTYPES)
    return [*wrong, *_features(role)] or [*_processes(role), *_model(role)]


def _features(role: EngineRole) -> Problems:
    """What of a model's own settings its engine does not have, or not with these sizes."""
    section, model, context = role.section.torchtitan, role.model, "context_parallel_size"
    faults: Problems = [
        _not_built(f"{role.model_key}.{name}", what, role.key) for name, what in features_not_built(model).items()
    ]
    if section[context] > 1 and not model.use_remove_padding:
        message = "the tokens of rows are shared only where rows are packed"
        fix = f"Set {role.model_key}.use_remove_padding=true, or the size to 1."
        faults.append(ConfigError(message, key=_key(role, context), got=section[context], fix=fix))
    return faults


def _processes(role: EngineRole) -> Problems:
    """The product of the sizes divides the processes; other sizes say what is left."""
    section, world = role.section.torchtitan, role.processes
    shared, copies = math.prod(section[name] for name in SIZES), section[COPIES]
    if world % (shared * copies):
        sizes = {name: section[name] for name in (*SIZES, COPIES) if section[name] > 1}
        products = ", ".join(map(str, divisors_of(world)))
        message = f"{world} process(es) cannot be shared by {' x '.join(f'{n} {size}' for n, size in sizes.items())}"
        fix = f"Change the sizes, or {role.started}."
        allowed = f"sizes whose product is one of {products}"
        return [ConfigError(message, key=_key(role, next(iter(sizes))), got=shared * copies, allowed=allowed, fix=fix)]
    per_copy = world // (copies * section["pipeline_parallel_size"])
    if per_copy % section[EXPERTS]:
        message = f"the {per_copy} process(es) that hold a copy of the weights cannot share the experts evenly"
        return [ConfigError(message, key=_key(role, EXPERTS), got=section[EXPERTS], allowed=divisors_of(per_copy))]
    left = {"data_parallel_size": world // shared, "data_parallel_shard_size": world // (shared * copies)}
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


def _model(role: EngineRole) -> Problems:
    """What the model's config.json says: a family that is there, and heads, layers and experts that can be shared."""
    facts = facts_of(role.path)
    if facts is None:
        return []
    family = facts.get("model_type")
    if family is not None and family not in FAMILIES:
        return [_not_built(f"{role.model_key}.path", f"a model of the type {family!r}", role.key, FAMILIES)]
    return _heads(role, facts) or _stages(role, facts) or _experts(role, facts)


def _heads(role: EngineRole, facts: dict[str, Any]) -> Problems:
    section, heads = role.section.torchtitan, facts.get("num_attention_heads")
    tensor, context = section["tensor_parallel_size"], section["context_parallel_size"]
    kv = facts.get("num_key_value_heads", heads)
    key = _key(role, "tensor_parallel_size")
    if wrong := uneven(key, tensor, heads, "attention heads") or uneven(key, tensor, kv, "KV heads"):
        return wrong
    if isinstance(heads, int) and heads > 0 and heads // tensor % context:
        message = f"the {heads // tensor} attention heads of a process cannot be exchanged for tokens evenly"
        return [_number(role, "context_parallel_size", message, divisors_of(heads // tensor))]
    return []


def _stages(role: EngineRole, facts: dict[str, Any]) -> Problems:
    name = "pipeline_parallel_size"
    stages, layers = role.section.torchtitan[name], facts.get("num_hidden_layers")
    if stages == 1:
        return []
    if facts.get("tie_word_embeddings"):
        message = "one weight for embedding and head (tie_word_embeddings), which are on different stages, is not built"
        fix = f"Set it to 1, or {role.key}.strategy=megatron."
        return [NotBuiltError(f"{message} yet", key=_key(role, name), got=stages, fix=fix)]
    if isinstance(layers, int) and stages > layers:
        return [_number(role, name, f"the model's {layers} layers are fewer than its stages", f"1 to {layers}")]
    return []


def _experts(role: EngineRole, facts: dict[str, Any]) -> Problems:
    section, experts = role.section.torchtitan, experts_of(facts)
    size, tensor = section[EXPERTS], section["tensor_parallel_size"]
    if experts is None:
        return [] if size == 1 else [_number(role, EXPERTS, "a dense model has no experts to share", [1])]
    if wrong := uneven(_key(role, EXPERTS), size, experts, "experts"):
        return wrong
    if tensor > 1 and size == 1:
        message = "experts cut by tensor-parallel ranks are not built yet: these share whole experts"
        fix = f"Set it to {tensor}, or tensor_parallel_size to 1."
        return [NotBuiltError(message, key=_key(role, EXPERTS), got=1, fix=fix)]
    return []


def _number(role: EngineRole, name: str, message: str, allowed: Any) -> ConfigError:
    return ConfigError(message, key=_key(role, name), got=role.section.torchtitan[name], allowed=allowed)


def _not_built(key: str, what: str, role: str, allowed: Any = None) -> NotBuiltError:
    message = f"{what} is not built yet on TorchTitan's models"
    return NotBuiltError(
        message, key=key, allowed=allowed and list(allowed), fix=f"Leave it out, {_INSTEAD.format(role)}"
    )


def _key(role: EngineRole, name: str) -> str:
    return f"{role.key}.torchtitan.{name}"


# ---- notices -------------------------------------------------------------------------------------------------------


def tell(cfg: PPOTrainerConfig) -> None:
    """What roles on TorchTitan do not read."""
    for role in roles(cfg):
        if is_chosen(role):
            tell_model(role)
    actor = cfg.actor_rollout_ref.actor
    if actor.strategy != NAME:
        return
    for name in ("use_torch_compile", "entropy_checkpointing", "entropy_from_logits_with_chunking"):
        if was_typed(actor, name) and actor[name]:
            notice(
                f"{_ACTOR}.{name}", f"has no effect with {_ACTOR}.strategy=torchtitan: {_ACTOR}.torchtitan.{name} has"
            )


def tell_model(role: EngineRole) -> None:
    """The attention that a model's section names."""
    if role.model is not None and (role.model.override_config or {}).get("attn_implementation"):
        key = f"{role.model_key}.override_config.attn_implementation"
        notice(key, f"has no effect with {role.key}.strategy=torchtitan, whose attention is that of packed rows")
