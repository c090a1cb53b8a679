"""Rules about ``strategy=megatron``: parallel sizes against processes and models, and what has no effect with it.

They run before anything is allocated; the engine checks again what it is given.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl import env
from verl.config.machine.config_json import adapter_on_experts, experts_of, facts_of
from verl.config.machine.pools import Pools
from verl.config.machine.topology import trained_roles
from verl.config.rules import megatron_fields
from verl.config.rules.checks import Problems, divisors_of
from verl.config.schema.distillation import teachers_of
from verl.config.schema.model import HFModelConfig
from verl.config.schema.node import ConfigNode, follows_another, replace, was_typed
from verl.config.schema.root import PPOTrainerConfig, uses_reference
from verl.config.schema.tree import in_range, one_of
from verl.errors import ConfigError, NotBuiltError
from verl.metrics import notice

if TYPE_CHECKING:
    from verl.config.schema.sft import SFTTrainerConfig

NAME, PACKAGE = "megatron", "megatron-core"
VERSIONS = ((0, 16), (0, 17))
"""From the first, and before the second."""
_MODEL, _REF, _TEACHERS = "actor_rollout_ref.model", "actor_rollout_ref.ref", "distillation.teacher_models"
_T, _P, _V, _E, _ET, _C = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "context_parallel_size",
)
_SIZES = (_T, _P, _V, _E, _ET, _C)
_FOLLOWING = ("param_offload", "optimizer_offload", "dtype")
"""Of supervised training: set for every engine at once."""
_DTYPES = ("auto", "fp32", "float32", "bf16", "bfloat16")
_HALF = ("fp16", "float16", "half")


@dataclass(frozen=True)
class MegatronRole:
    """One model of a run.

    Args:
        key: its section; ``<key>.strategy`` names its backend.
        section: its settings there.
        others: key and section of the backend that shards by FSDP.
        path: folder or hub name of the model.
        pool, processes: where it runs, and on how many processes.
        started: what says how many these are.
        adapter: the setting that puts a LoRA adapter on the model; None where there is none.
        model_key, model: key and section of the model's own settings.
    """

    key: str
    section: Any
    others: tuple[str, ConfigNode]
    path: str | None
    pool: str
    processes: int
    started: str = "trainer.n_gpus_per_node x trainer.nnodes"
    adapter: str | None = None
    model_key: str = _MODEL
    model: Any = None

    @property
    def is_megatron(self) -> bool:
        return self.section.strategy == NAME

    @property
    def has_own_sizes(self) -> bool:
        """Whether a section of its own, and not that of FSDP, says how the model is shared."""
        return self.section.strategy in (NAME, "torchtitan")

    @property
    def sizes(self) -> Any:
        return self.section.megatron

    def of(self, name: str) -> str:
        return f"{self.key}.megatron.{name}"


def roles(cfg: PPOTrainerConfig) -> Iterator[MegatronRole]:
    """The models that a run holds on a training backend."""
    policy, model, pools = cfg.actor_rollout_ref, cfg.reward.reward_model, Pools.of(cfg)
    held = {
        "actor": (policy.model.path, _adapter(_MODEL, policy.model), _MODEL, policy.model),
        "ref": (policy.model.path, None, _MODEL, policy.model),
        "critic": (cfg.critic.model.path, _adapter("critic.model", cfg.critic.model), "critic.model", cfg.critic.model),
        "rm": (model.model_path, None, "reward.reward_model", model),
    }
    for teacher in teachers_of(cfg):  # first: what is keyed by the section is of the reference policy, if there is one
        pool, ref = pools.of_role(teacher.pool), policy.ref
        if not (uses_reference(cfg) and pool == pools.of_role("ref")):
            of_fsdp = (f"{_REF}.fsdp_config", ref.fsdp_config)
            bare = replace(policy.model, lora_rank=0, lora_adapter_path=None, lora_base_quantization=None)
            yield MegatronRole(_REF, ref, of_fsdp, teacher.path, pool.name, pool.size, model_key=_TEACHERS, model=bare)
    for name, key, section, fsdp in trained_roles(cfg):
        pool, (path, adapter, model_key, settings) = pools.of_role(name), held[name]
        others = (f"{key}.{fsdp}", section[fsdp])
        yield MegatronRole(
            key, section, others, path, pool.name, pool.size, adapter=adapter, model_key=model_key, model=settings
        )


def problems(cfg: PPOTrainerConfig) -> Problems:
    """What is wrong with the roles on Megatron-Core; without one nothing is."""
    megatron_roles = [role for role in roles(cfg) if role.is_megatron]
    problems: Problems = []
    for role in megatron_roles:
        problems += _numbers(role) or _processes(role) + _model(role)
        problems += megatron_fields.problems(f"{role.key}.megatron", role.section.megatron)
    return problems or _one_set_of_groups(megatron_roles)


def supervised_problems(cfg: SFTTrainerConfig) -> Problems:
    """The same for a supervised run, whose processes torchrun starts."""
    role = role_of_supervised(cfg)
    if not role.is_megatron:
        return []
    fields = megatron_fields.problems(f"{role.key}.megatron", role.section.megatron)
    return (_numbers(role) or _processes(role) + _model(role)) + fields


def role_of_supervised(cfg: SFTTrainerConfig) -> MegatronRole:
    """The one model of a supervised run."""
    started = "what torchrun starts (--nproc_per_node)"
    others, world = ("engine", cfg.engine), env.get_int("WORLD_SIZE", 1)
    adapter = _adapter("model", cfg.model)
    return MegatronRole("engine", cfg.engine, others, cfg.model.path, "", world, started, adapter, "model", cfg.model)


def _adapter(key: str, model: HFModelConfig) -> str | None:
    return next((f"{key}.{name}" for name in ("lora_rank", "lora_adapter_path") if model[name]), None)


def refuse_without_cuda(on_megatron: Iterable[MegatronRole], device: str, external_lib: str | None) -> None:
    """Raise `ConfigError` for a role on Megatron-Core where nothing answers its CUDA calls.

    Args:
        device: of the workers.
        external_lib: a module of the person's own, which may answer them.
    """
    for role in on_megatron:
        if role.is_megatron and device != "cuda" and not external_lib:
            raise ConfigError(
                f"Megatron-Core calls CUDA, and this run is on {device}",
                key=f"{role.key}.strategy",
                got=NAME,
                allowed=f"plain (one process), fsdp or fsdp2 on {device}",
                fix="Leave it out, or run on a machine with CUDA. A module that answers these calls instead goes into "
                "external_lib of the model.",
            )


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


def _numbers(role: MegatronRole) -> Problems:
    """What each setting may be by itself."""
    problems: Problems = []
    for name in _SIZES:
        value = role.sizes[name]
        problems += in_range(role.of(name), value, "1 or more", value is None or value >= 1)
    dtype = role.sizes.dtype.removeprefix("torch.")
    if dtype in _HALF:
        message, fix = "training in float16 needs loss scaling, which this engine does not have", "Use bfloat16."
        return [*problems, NotBuiltError(message, key=role.of("dtype"), got=dtype, fix=fix)]
    return problems + one_of(role.of("dtype"), dtype, _DTYPES)


def _processes(role: MegatronRole) -> Problems:
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


def _model(role: MegatronRole) -> Problems:
    """What the model's config.json says: heads, layers and experts divide evenly."""
    facts = facts_of(role.path)
    if facts is None:
        return []
    heads, layers = facts.get("num_attention_heads"), facts.get("num_hidden_layers")
    experts = experts_of(facts)
    pipeline, virtual, expert = (role.sizes[name] for name in (_P, _V, _E))
    problems = _divides(role, _T, heads, "attention heads")
    problems = problems or _divides(role, _T, facts.get("num_key_value_heads", heads), "KV heads")
    problems = problems or _context(role, heads)
    problems += _divides(role, _P, layers, "layers")
    if virtual is not None and pipeline < 2:
        fix = f"Leave it out, or set {role.of(_P)} to 2 or more."
        problems.append(ConfigError("layer groups need a pipeline", key=role.of(_V), got=virtual, fix=fix))
    elif virtual == 1:
        message = "one group of layers per stage is a pipeline without groups"
        problems.append(ConfigError(message, key=role.of(_V), got=1, allowed="null, or 2 or more", fix="Leave it out."))
    elif virtual is not None and not problems and layers:
        problems += _divides(role, _V, layers // pipeline, "layers of a pipeline stage")
    if expert > 1 and layers and experts is None:
        message = "a model without experts cannot share them among processes"
        problems.append(ConfigError(message, key=role.of(_E), got=expert, allowed=[1], fix="Leave it out."))
    if experts and role.adapter:
        problems += _adapter_of_mixture(role)
    return problems + _divides(role, _E, experts, "experts")


def _adapter_of_mixture(role: MegatronRole) -> Problems:
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


def _context(role: MegatronRole, heads: Any) -> Problems:
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


def _divides(role: MegatronRole, name: str, count: Any, what: str) -> Problems:
    size = role.sizes[name]
    if not isinstance(count, int) or count < 1 or count % size == 0:
        return []
    sizes = divisors_of(count)
    message = f"the model's {count} {what} cannot be split evenly over {size}"
    return [ConfigError(message, key=role.of(name), got=size, allowed=sizes, fix="Set it to one of these.")]


def _one_set_of_groups(on_megatron: list[MegatronRole]) -> Problems:
    """Roles in the same processes have the same sizes: Megatron-Core has one set of groups per process."""
    first: dict[str, MegatronRole] = {}
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
    """One notice per role for what its backend does not read."""
    for role in roles(cfg):
        key, fsdp = role.others
        if role.is_megatron:
            tell_names(
                key,
                set_names(fsdp),
                f"has no effect with {role.key}.strategy=megatron: its settings are {role.key}.megatron",
            )
        else:
            tell_names(
                f"{role.key}.megatron", set_names(role.sizes), f"has no effect without {role.key}.strategy=megatron"
            )
    if cfg.actor_rollout_ref.actor.strategy == NAME:
        _tell_actor(cfg)


def tell_supervised(cfg: SFTTrainerConfig) -> None:
    """The same for a supervised run."""
    role = role_of_supervised(cfg)
    if not role.is_megatron:
        why = "has no effect without engine.strategy=megatron"
        tell_names("engine.megatron", [name for name in set_names(role.sizes) if name not in _FOLLOWING], why)
        return
    idle = [
        name
        for name in set_names(cfg.engine)
        if name not in _FOLLOWING and not name.startswith(("strategy", NAME, "torchtitan"))
    ]
    tell_names("engine", idle, "has no effect with engine.strategy=megatron: its settings are engine.megatron")
    _tell_model("model", cfg.model, role.key)


def _tell_actor(cfg: PPOTrainerConfig) -> None:
    actor = cfg.actor_rollout_ref.actor
    _tell_model(_MODEL, cfg.actor_rollout_ref.model, "actor_rollout_ref.actor")
    why = "has no effect with actor_rollout_ref.actor.strategy=megatron"
    for name in (
        "use_prefix_grouper",
        "use_torch_compile",
        "entropy_checkpointing",
        "entropy_from_logits_with_chunking",
    ):
        if was_typed(actor, name) and actor[name]:
            notice(f"actor_rollout_ref.actor.{name}", why)


def _tell_model(key: str, model: ConfigNode, role: str) -> None:
    """What of a model's section does nothing with Megatron-Core."""
    why = f"has no effect with {role}.strategy=megatron"
    again = f"{why}: {role}.megatron.override_transformer_config.recompute_granularity has"
    for name in ("use_liger", "use_fused_kernels", "enable_activation_offload", "enable_gradient_checkpointing"):
        if was_typed(model, name) and model[name]:
            notice(f"{key}.{name}", again if name == "enable_gradient_checkpointing" else why)


def tell_names(section: str, names: list[str], why: str) -> None:
    """One notice for settings of a section that have no effect."""
    if names:
        others = f"; nor have {', '.join(names[1:])}" if names[1:] else ""
        notice(f"{section}.{names[0]}", why + others)


def set_names(node: ConfigNode) -> list[str]:
    """Leaves of a section and of those in it that somebody set: typed, or not the default and following nothing."""
    usual, names = type(node)(), []
    for name, field in type(node).__dataclass_fields__.items():
        if field.metadata.get("section") is not None:
            names += [f"{name}.{inner}" for inner in set_names(node[name])]
        elif was_typed(node, name) or (node[name] != usual[name] and not follows_another(node, name)):
            names.append(name)
    return names
