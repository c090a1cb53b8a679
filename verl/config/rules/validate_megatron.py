"""Rules about ``strategy=megatron``: parallel sizes against processes and models, and what has no effect with it.

They run before anything is allocated; the engine checks again what it is given.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from typing import TYPE_CHECKING, Any

from verl.config.machine.config_json import adapter_on_experts, experts_of, facts_of
from verl.config.machine.pools import EngineRole, roles
from verl.config.rules import megatron_fields
from verl.config.rules.checks import Problems, caught, divisors_of, uneven
from verl.config.schema.node import ConfigNode, was_typed
from verl.config.schema.root import PPOTrainerConfig
from verl.config.schema.tree import one_of
from verl.errors import ConfigError, NotBuiltError
from verl.metrics import notice

if TYPE_CHECKING:
    from verl.config.schema.sft import SupervisedConfig

NAME, PACKAGE = "megatron", "megatron-core"
VERSIONS = ((0, 16), (0, 17))
"""From the first, and before the second."""
_MODEL = "actor_rollout_ref.model"
_T, _P, _V, _E, _ET, _C = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "context_parallel_size",
)
_SIZES = (_T, _P, _V, _E, _ET, _C)
_DTYPES = ("auto", "fp32", "float32", "bf16", "bfloat16")
_HALF = ("fp16", "float16", "half")


def problems(cfg: PPOTrainerConfig | SupervisedConfig) -> Problems:
    """What is wrong with the roles on Megatron-Core; without one nothing is."""
    megatron_roles = [role for role in roles(cfg) if role.is_megatron]
    problems: Problems = []
    for role in megatron_roles:
        problems += _shared(role)
        problems += megatron_fields.problems(f"{role.key}.megatron", role.section.megatron)
    return problems or _one_set_of_groups(megatron_roles)


def missing_or_other(key: str) -> Problems:
    """Megatron-Core is not installed, or another version than the engine was written for."""
    low, high = (".".join(map(str, version)) for version in VERSIONS)
    fix = f"pip install '{PACKAGE}>={low},<{high}', or set {key}=fsdp2."
    if importlib.util.find_spec(NAME) is None:
        return [ConfigError("Megatron-Core is not installed", key=key, got=NAME, fix=fix)]
    try:
        version = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return []  # a checkout on the path: the engine reads its version
    if VERSIONS[0] <= tuple(int(part) for part in version.split(".")[:2]) < VERSIONS[1]:
        return []
    allowed = f"{low} or newer, before {high}"
    message = "this version of Megatron-Core is not the one that the engine is written for"
    return [ConfigError(message, key=key, got=f"{PACKAGE} {version}", allowed=allowed, fix=fix)]


def _dtype(role: EngineRole) -> Problems:
    """Weights in float16 need a loss scale."""
    dtype = role.sizes.dtype.removeprefix("torch.")
    if dtype in _HALF:
        message, fix = "training in float16 needs loss scaling, which this engine does not have", "Use bfloat16."
        return [NotBuiltError(message, key=role.of("dtype"), got=dtype, fix=fix)]
    return one_of(role.of("dtype"), dtype, _DTYPES)


def _shared(role: EngineRole) -> Problems:
    """How processes and the model divide; sizes below 1 are refused at their settings."""
    if any(role.sizes[name] is not None and role.sizes[name] < 1 for name in _SIZES):
        return []
    return _dtype(role) or _processes(role) + _model(role)


def _processes(role: EngineRole) -> Problems:
    """Copies of t x p processes must fill the pool, groups of c copies, and copies of the experts a pipeline stage."""
    tensor, pipeline, expert, shared = (role.sizes[name] for name in (_T, _P, _E, _ET))
    world = role.processes
    if world % (tensor * pipeline):
        products = [f"{t} x {p}" for t in range(1, world + 1) for p in range(1, world + 1) if world % (t * p) == 0]
        return [
            ConfigError(
                f"{world} process(es) cannot be cut into copies of {tensor} (tensor) x {pipeline} (pipeline)",
                key=role.of(_P if world % tensor == 0 else _T),
                got=pipeline if world % tensor == 0 else tensor,
                allowed=f"tensor x pipeline of {', '.join(products[:16])}",
                fix=f"Change the sizes, or {role.started}.",
            )
        ]
    copies, context = world // (tensor * pipeline), role.sizes[_C]
    if copies % context:
        message = (
            f"the {copies} copies of {tensor} x {pipeline} processes cannot be cut into groups of {context} (context)"
        )
        allowed = divisors_of(copies)
        fix = f"Set it to one of these, or change {role.started}."
        return [ConfigError(message, key=role.of(_C), got=context, allowed=allowed, fix=fix)]
    stage, shared = world // pipeline, tensor if shared is None else shared
    if stage % (expert * shared) == 0:
        return []
    sizes = [size for size in range(1, stage + 1) if stage % (size * shared) == 0]
    message = f"the {stage} process(es) of a pipeline stage cannot be cut into copies of {expert} (expert) x {shared}"
    fix = f"Set it to one of these{f', or {role.of(_ET)}=1' if shared > 1 else ''}."
    return [ConfigError(message, key=role.of(_E), got=expert, allowed=sizes or "none", fix=fix)]


def _model(role: EngineRole) -> Problems:
    """What the model's config.json says: heads, layers and experts divide evenly."""
    facts = facts_of(role.path)
    if facts is None:
        return []
    heads, layers = facts.get("num_attention_heads"), facts.get("num_hidden_layers")
    experts = experts_of(facts)
    pipeline, virtual, expert = (role.sizes[name] for name in (_P, _V, _E))
    problems = uneven(role.of(_T), role.sizes[_T], heads, "attention heads")
    problems = problems or uneven(role.of(_T), role.sizes[_T], facts.get("num_key_value_heads", heads), "KV heads")
    problems = problems or _context(role, heads)
    if virtual is not None and pipeline < 2:
        fix = f"Leave it out, or set {role.of(_P)} to 2 or more."
        problems.append(ConfigError("layer groups need a pipeline", key=role.of(_V), got=virtual, fix=fix))
    elif virtual == 1:
        message = "one group of layers per stage is a pipeline without groups"
        problems.append(ConfigError(message, key=role.of(_V), got=1, allowed="null, or 2 or more", fix="Leave it out."))
    elif layers:
        problems += caught(megatron_fields.stage_depths, f"{role.key}.megatron", role.section.megatron, layers)
    if expert > 1 and layers and experts is None:
        message = "a model without experts cannot share them among processes"
        problems.append(ConfigError(message, key=role.of(_E), got=expert, allowed=[1], fix="Leave it out."))
    if experts and role.adapter:
        problems += _adapter_of_mixture(role)
    return problems + uneven(role.of(_E), role.sizes[_E], experts, "experts")


def _adapter_of_mixture(role: EngineRole) -> Problems:
    """Experts that are whole on a process may have an adapter, routers may not, and all-linear names both."""
    name, else_set = adapter_on_experts(role.model), f"or {role.key}.strategy=fsdp2."
    if name is None:
        return []
    names = [] if name == "target_modules" else [str(each) for each in role.model.target_parameters]
    if not names or any(each.rpartition(".")[2] not in ("gate_up_proj", "down_proj") for each in names):
        message = "LoRA on the routers of a mixture, which all-linear includes, is not built yet on Megatron-Core"
        targets = f"{role.model_key}.target_modules=[q_proj,k_proj,v_proj,o_proj]"
        experts = f"{role.model_key}.target_parameters=[mlp.experts.gate_up_proj,mlp.experts.down_proj]"
        fix = f"Set {targets}, for experts also {experts}, {else_set}"
        return [NotBuiltError(message, key=role.adapter, fix=fix)]
    shared = role.sizes[_T] if role.sizes[_ET] is None else role.sizes[_ET]
    if shared > 1:
        message = f"LoRA on experts of which {shared} processes have a part each is not built yet"
        return [NotBuiltError(message, key=role.adapter, fix=f"Set {role.of(_ET)}=1, {else_set}")]
    return []


def _context(role: EngineRole, heads: Any) -> Problems:
    """Processes that share a row's tokens exchange them for heads; Transformer Engine sends keys and values round."""
    context = role.sizes[_C]
    if context > 1 and role.model is not None and not role.model.use_remove_padding:
        packing = f"{role.model_key}.use_remove_padding"
        message = f"the tokens of rows are shared only where rows are packed, and {packing} is false"
        return [ConfigError(message, key=role.of(_C), got=context, fix=f"Set {packing}=true, or leave it out.")]
    if not isinstance(heads, int) or importlib.util.find_spec("transformer_engine") is not None:
        return []
    each = heads // role.sizes[_T]
    if each % context == 0:
        return []
    message = f"the {each} attention heads of a tensor-parallel process cannot be split evenly over {context}"
    allowed = divisors_of(each)
    return [ConfigError(message, key=role.of(_C), got=context, allowed=allowed, fix="Set it to one of these.")]


def _one_set_of_groups(on_megatron: list[EngineRole]) -> Problems:
    """Roles in the same processes have the same sizes: Megatron-Core has one set of groups per process."""
    first: dict[str, EngineRole] = {}
    problems: Problems = []
    for role in on_megatron:
        other = first.setdefault(role.pool, role)
        for name in _SIZES:
            mine, theirs = role.sizes[name], other.sizes[name]
            if mine != theirs:
                message = f"{other.of(name)} is {theirs}, and Megatron-Core has one set of groups per process"
                fix = "Give both the same size, or the role a pool of its own with trainer.resource_pools."
                problems.append(ConfigError(message, key=role.of(name), got=mine, allowed=[theirs], fix=fix))
    return problems


# ---- notices -------------------------------------------------------------------------------------------------------


def tell(cfg: PPOTrainerConfig) -> None:
    """Settings of the actor and of its model that Megatron-Core's engine does not read."""
    if cfg.actor_rollout_ref.actor.strategy == NAME:
        _tell_actor(cfg)


def _tell_actor(cfg: PPOTrainerConfig) -> None:
    actor = cfg.actor_rollout_ref.actor
    tell_model(_MODEL, cfg.actor_rollout_ref.model, "actor_rollout_ref.actor")
    why = "has no effect with actor_rollout_ref.actor.strategy=megatron"
    for name in (
        "use_prefix_grouper",
        "use_torch_compile",
        "entropy_checkpointing",
        "entropy_from_logits_with_chunking",
    ):
        if was_typed(actor, name) and actor[name]:
            notice(f"actor_rollout_ref.actor.{name}", why)


def tell_model(key: str, model: ConfigNode, role: str) -> None:
    """What of a model's section does nothing with Megatron-Core."""
    why = f"has no effect with {role}.strategy=megatron"
    again = f"{why}: {role}.megatron.override_transformer_config.recompute_granularity has"
    for name in ("use_liger", "use_fused_kernels", "enable_activation_offload", "enable_gradient_checkpointing"):
        if was_typed(model, name) and model[name]:
            notice(f"{key}.{name}", again if name == "enable_gradient_checkpointing" else why)
