"""The pools of a run, processes per node and the roles that have a pool of their own, and the devices of a sampler.

A pool is named by ``trainer.resource_pools``, or made for the reward model (``reward.reward_model.enable_resource_pool``)
or for the samplers (``actor_rollout_ref.hybrid_engine=false``). All other roles share the global pool. A replica of the
hf engine is one process; vLLM and SGLang share a model among workers of their own. Replicas may be
replaced during a run (``rollout.max_replacements``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl import env
from verl.config.rules.checks import Problems, caught
from verl.config.schema.model import HFModelConfig
from verl.config.schema.node import ConfigNode, replace, was_typed
from verl.config.schema.root import (
    TEACHER_POOL,
    PPOTrainerConfig,
    teachers_in_roles,
    uses_critic,
    uses_reference,
    uses_reward_model,
)
from verl.config.schema.tree import in_range, one_of
from verl.errors import ConfigError, NotBuiltError
from verl.metrics import notice

if TYPE_CHECKING:
    from verl.config.schema.rollout import RolloutConfig
    from verl.config.schema.sft import SupervisedConfig

GLOBAL_POOL, REWARD_POOL, ROLLOUT_POOL = "global_pool", "reward_pool", "rollout_pool"
POOLED_ROLES = ["critic", "ref", "rm", "rollout", "teacher"]
"""Roles that may have processes of their own."""
_KEY, _A, _R = "trainer.resource_pools", "actor_rollout_ref", "actor_rollout_ref.rollout"


@dataclass(frozen=True)
class PoolSpec:
    """Processes that hold the same roles.

    Args:
        processes: of each node.
    """

    name: str
    processes: tuple[int, ...]

    @property
    def size(self) -> int:
        """Processes over all nodes; ranks count through them, node after node."""
        return sum(self.processes)


@dataclass(frozen=True)
class Pools:
    """Every pool that the configuration describes, and the roles that it names for one.

    A description that `problems` refuses is left out: other rules can still run.
    """

    by_name: Mapping[str, PoolSpec]
    named: Mapping[str, str]

    @classmethod
    def of(cls, cfg: PPOTrainerConfig) -> Pools:
        """The pools of a configuration, be it right or wrong."""
        trainer = cfg.trainer
        pools_by_name = {GLOBAL_POOL: PoolSpec(GLOBAL_POOL, (trainer.n_gpus_per_node or 1,) * trainer.nnodes)}
        named: dict[str, str] = {}
        for role, pool in (
            ("rm", _of_reward_model(cfg)),
            ("rollout", _of_samplers(cfg)),
            ("teacher", _of_teachers(cfg)),
        ):
            if pool is not None:
                pools_by_name[pool.name], named[role] = pool, pool.name
        for name, described in trainer.resource_pools.items():
            if not _wrong(f"{_KEY}.{name}", described):
                pools_by_name[name] = PoolSpec(name, tuple(described["processes"]))
                named |= dict.fromkeys(described["roles"], name)
        return cls(pools_by_name, named)

    def of_role(self, role: str) -> PoolSpec:
        """Where a role lives; ``role`` is a name that ``trainer.resource_pools`` knows, or any other."""
        return self.by_name[self.named.get(role, GLOBAL_POOL)]


def problems(cfg: PPOTrainerConfig) -> Problems:
    """What each pool has to say, that no role is named twice, and what the samplers' own pool needs."""
    seen: dict[str, str] = {}
    for name, pool in cfg.trainer.resource_pools.items():
        problems = _wrong(f"{_KEY}.{name}", pool)
        for role in [] if problems else pool["roles"]:
            if role in seen:
                problems.append(ConfigError(f"the role {role!r} is in two pools", key=_KEY, got=[seen[role], name]))
            seen[role] = name
        if problems:
            return problems
    return _reserved(cfg) or _pool_of_samplers(cfg, named="rollout" in seen)


def _wrong(key: str, pool: Any) -> Problems:
    """What is wrong with the description of one pool."""
    shape = "{roles: [critic], processes: [2]}, the processes of each node"
    if not isinstance(pool, Mapping) or set(pool) != {"roles", "processes"}:
        return [ConfigError("not the description of a pool", key=key, got=pool, allowed=shape)]
    counts, roles = pool["processes"], pool["roles"]
    if not isinstance(counts, list) or not counts or not all(type(n) is int and n >= 1 for n in counts):
        return [ConfigError("not a list of processes per node", key=f"{key}.processes", got=counts, allowed=shape)]
    if not isinstance(roles, list) or not roles:
        return [ConfigError("not a list of roles", key=f"{key}.roles", got=roles, allowed=shape)]
    return [problem for role in roles for problem in one_of(f"{key}.roles", role, POOLED_ROLES)]


def _reserved(cfg: PPOTrainerConfig) -> Problems:
    """Names that other settings give to pools."""
    reserved = {GLOBAL_POOL: "trainer.nnodes x trainer.n_gpus_per_node"}
    if _of_reward_model(cfg) is not None:
        reserved[REWARD_POOL] = "reward.reward_model.enable_resource_pool"
    if _of_samplers(cfg) is not None:
        reserved[ROLLOUT_POOL] = f"{_A}.hybrid_engine=false"
    if _of_teachers(cfg) is not None:
        reserved[TEACHER_POOL] = "distillation.nnodes"
    fix = "Give the pool another name."
    return [
        ConfigError(f"the pool of {reserved[name]} has this name", key=_KEY, got=name, fix=fix)
        for name in cfg.trainer.resource_pools
        if name in reserved
    ]


def _pool_of_samplers(cfg: PPOTrainerConfig, named: bool) -> Problems:
    """``hybrid_engine`` and ``rollout.nnodes`` say the same twice; so does a pool that names the role ``rollout``."""
    rollout, split, key = cfg.actor_rollout_ref.rollout, not cfg.actor_rollout_ref.hybrid_engine, f"{_R}.nnodes"
    nodes, per_node = rollout.nnodes, rollout.n_gpus_per_node
    problems = in_range(key, nodes, "0 or more", nodes >= 0)
    problems += in_range(f"{_R}.n_gpus_per_node", per_node, "1 or more", per_node is None or per_node >= 1)
    if problems:
        return problems
    if named and nodes > 0:
        message = f"{_KEY} has a pool for the role 'rollout' as well"
        return [ConfigError(message, key=key, got=nodes, fix="Keep one of the two.")]
    if split and nodes == 0 and not named:
        fix = f"Set {key}=1 and {_R}.n_gpus_per_node, or leave {_A}.hybrid_engine out."
        message = "separate samplers need a pool, and it has 0 nodes"
        return [ConfigError(message, key=key, got=0, allowed="1 or more", fix=fix)]
    if nodes > 0 and not split:
        message = (
            f"the samplers share the processes of the trainers, and have no nodes of their own to fill ({nodes} set)"
        )
        fix = f"Set {_A}.hybrid_engine=false for a pool of their own, or leave it out."
        return [ConfigError(message, key=key, got=nodes, allowed=[0], fix=fix)]
    return []


def tell(cfg: PPOTrainerConfig) -> None:
    """A notice of the size of a pool that there is not."""
    rollout, key = cfg.actor_rollout_ref.rollout, f"{_R}.n_gpus_per_node"
    shared = rollout.nnodes == 0 and rollout.n_gpus_per_node != cfg.trainer.n_gpus_per_node
    if shared and was_typed(rollout, "n_gpus_per_node"):
        notice(key, f"has no effect with {_R}.nnodes=0")


def _of_reward_model(cfg: PPOTrainerConfig) -> PoolSpec | None:
    """Of one with a scalar head; servers have no workers in a pool."""
    model = cfg.reward.reward_model
    is_pooled = model.enable_resource_pool and model.rollout.name == "hf"
    return PoolSpec(REWARD_POOL, (model.n_gpus_per_node,) * model.nnodes) if is_pooled else None


def _of_teachers(cfg: PPOTrainerConfig) -> PoolSpec | None:
    settings = cfg.distillation
    if not settings.enabled or settings.nnodes < 1:
        return None
    return PoolSpec(TEACHER_POOL, (settings.n_gpus_per_node,) * settings.nnodes)


def _of_samplers(cfg: PPOTrainerConfig) -> PoolSpec | None:
    rollout = cfg.actor_rollout_ref.rollout
    if cfg.actor_rollout_ref.hybrid_engine or rollout.nnodes < 1:
        return None
    return PoolSpec(ROLLOUT_POOL, (rollout.n_gpus_per_node or 1,) * rollout.nnodes)


OWN_PROCESSES = ("vllm", "sglang")
"""Engines that start the processes of a replica themselves: a run of one process holds one of any size."""
_T, _P, _E = "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_parallel_size"


@dataclass(frozen=True)
class ReplicaSpec:
    """What one sampling engine takes; its experts are on the devices that it has anyway."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: int = 1

    @property
    def devices(self) -> int:
        """Of one replica."""
        return self.tensor * self.pipeline * self.data

    def __str__(self) -> str:
        pipeline = f" x {self.pipeline} (pipeline)" if self.pipeline > 1 else ""
        data = f" x {self.data} (data)" if self.data > 1 else ""
        return f"{self.tensor} (tensor){pipeline}{data}"


def spec_of(rollout: RolloutConfig) -> ReplicaSpec:
    """The sizes of one replica."""
    return ReplicaSpec(rollout[_T], rollout[_P], expert=rollout[_E])


def addresses_of(rollout: RolloutConfig) -> list[str]:
    """Servers that sample and run already: ``server.url`` of the engines that query servers."""
    if rollout.name not in ("server", "sglang") or not rollout.server.url:
        return []
    named = rollout.server.url
    return [named] if isinstance(named, str) else list(named)


def starts_no_engine(rollout: RolloutConfig) -> bool:
    """Servers that run already have sizes of their own."""
    return rollout.name == "server" or bool(addresses_of(rollout))


def largest(key: str, rollout: RolloutConfig) -> str:
    """The size to which a problem with their product is put down."""
    return f"{key}.{_T if rollout[_T] >= rollout[_P] else _P}"


def served_problems(cfg: PPOTrainerConfig) -> Problems:
    """Of a program whose samplers are servers that are started for it, each with devices of its own."""
    rollout, trainer = cfg.actor_rollout_ref.rollout, cfg.trainer
    processes = trainer.nnodes * (trainer.n_gpus_per_node or 1)
    problems = sizes(_R, rollout)
    if problems or processes < 1 or rollout.server.url:
        return problems
    if trainer.nnodes > 1:
        fix = f"Start servers on the other nodes and name all of them: {_R}.name=server {_R}.server.url=[...]."
        message, key = "servers are started on this machine only", "trainer.nnodes"
        return [ConfigError(message, key=key, got=trainer.nnodes, allowed="1", fix=fix)]
    spec = spec_of(rollout)
    needed = spec.devices
    if processes % needed == 0:
        return []
    message = f"{processes} device(s) cannot be shared out to servers of {spec} = {needed}"
    allowed, fix = f"a multiple of {needed}", f"Change it, or {_R}.{_T}."
    return [ConfigError(message, key="trainer.n_gpus_per_node", got=processes, allowed=allowed, fix=fix)]


def on_machine(key: str, rollout: RolloutConfig, device: str | None, is_local: bool = True) -> Problems:
    """More devices than the one process that samples can see.

    Args:
        key: the rollout section's.
        device: as it is set; null: what there is.
        is_local: this process, which sees all devices of the machine; a worker of a cluster sees one.
    """
    from verl import device as devices  # torch is loaded only once there is something to validate

    needed = spec_of(rollout).devices
    if needed == 1 or rollout.name not in OWN_PROCESSES or starts_no_engine(rollout):
        return []
    if caught(devices.resolve_device, device):
        return []  # another rule reports it
    kind = devices.resolve_device(device)
    there = 1 if not is_local else devices.device_count(kind)
    if kind == "cpu" or needed <= there:  # on a CPU the engine's own processes share it
        return []
    here = f"{there} GPU{'s' if there != 1 else ''}"
    message = f"one engine takes {spec_of(rollout)} = {needed} devices, and the process that builds it has {here}"
    fix = "Make it smaller, or leave it out."
    return [ConfigError(message, key=largest(key, rollout), got=needed, allowed=f"at most {there}", fix=fix)]


def sizes(key: str, rollout: RolloutConfig) -> Problems:
    """What each parallel size may be by itself, and that of the experts with the others."""
    problems: Problems = []
    for name in (_T, _P, _E):
        problems += in_range(f"{key}.{name}", rollout[name], "1 or more", rollout[name] >= 1)
    if not problems and rollout.name == "hf" and spec_of(rollout).devices > 1:
        message, named = "the hf engine holds the whole model in one process", largest(key, rollout)
        fix = f"Leave it out, or set {key}.name to vllm or sglang, which share a model out."
        return [ConfigError(message, key=named, got=spec_of(rollout).devices, allowed=[1], fix=fix)]
    if problems or rollout[_E] == 1:
        return problems
    if rollout.name == "sglang":
        return _experts_of_sglang(key, rollout)
    if rollout.name != "vllm" or rollout[_E] == rollout[_T]:
        return problems
    message = (
        f"vLLM splits the experts over all {rollout[_T]} tensor-parallel processes of an engine or to none; over more "
    )
    message += "of them it needs data parallelism inside the sampler, which is not built yet"
    allowed = sorted({1, rollout[_T]})
    fix = f"Set it to one of these, or {key}.{_T} to {rollout[_E]}."
    return [NotBuiltError(message, key=f"{key}.{_E}", got=rollout[_E], allowed=allowed, fix=fix)]


def _experts_of_sglang(key: str, rollout: Any) -> Problems:
    """Groups of its tensor-parallel processes hold the experts."""
    tensor, experts = rollout[_T], rollout[_E]
    if tensor % experts == 0:
        return []
    message = f"SGLang divides the {tensor} tensor-parallel processes of a server into groups for the experts"
    allowed = [n for n in range(1, tensor + 1) if tensor % n == 0]
    return [ConfigError(message, key=f"{key}.{_E}", got=experts, allowed=allowed, fix=f"Change it, or {key}.{_T}.")]


REPLACED = "actor_rollout_ref.rollout.max_replacements"


def is_elastic(cfg: PPOTrainerConfig) -> bool:
    """Whether each replica is a separate process, which is replaced when it is lost."""
    return cfg.actor_rollout_ref.rollout.max_replacements > 0 and not _why_not(cfg)


def elastic_problems(cfg: PPOTrainerConfig) -> Problems:
    """A pool that replicas share with another role."""
    number, pools = cfg.actor_rollout_ref.rollout.max_replacements, Pools.of(cfg)
    shared = sorted(
        role for role in pools.named if role != "rollout" and pools.of_role(role) == pools.of_role("rollout")
    )
    if number > 0 and not _why_not(cfg) and shared:
        message = f"a replica would be replaced together with {', '.join(shared)}, which share its process"
        fix = "Give the samplers a pool that holds no other role."
        return [ConfigError(message, key=REPLACED, got=number, allowed=[0], fix=fix)]
    return []


def tell_elastic(cfg: PPOTrainerConfig) -> None:
    """A notice where nothing can be replaced."""
    if cfg.actor_rollout_ref.rollout.max_replacements > 0:
        why = _why_not(cfg)
        if why:
            notice(REPLACED, f"has no effect: {why}")
        elif cfg.actor_rollout_ref.rollout.profiler.enable:
            notice(
                f"{REPLACED}, profiler",
                "replicas that are replaced are not profiled, only the process with their service",
            )


def _why_not(cfg: PPOTrainerConfig) -> str:
    pools = Pools.of(cfg)
    if starts_no_engine(cfg.actor_rollout_ref.rollout):
        return "the servers that sample run already, and their operator replaces them"
    if pools.of_role("rollout") == pools.of_role("actor"):
        return (
            "the samplers share the trainers' processes, and one that dies takes its trainer along. Set "
            "actor_rollout_ref.hybrid_engine=false, which gives them a pool on Ray"
        )
    return ""


_MODEL, _REF, _TEACHERS = "actor_rollout_ref.model", "actor_rollout_ref.ref", "distillation.teacher_models"


@dataclass(frozen=True)
class EngineRole:
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
        return self.section.strategy == "megatron"

    @property
    def has_own_sizes(self) -> bool:
        """Whether a section of its own, and not that of FSDP, says how the model is shared."""
        return self.section.strategy in ("megatron", "torchtitan")

    @property
    def sizes(self) -> Any:
        return self.section.megatron

    def of(self, name: str) -> str:
        return f"{self.key}.megatron.{name}"


def trained_roles(cfg: PPOTrainerConfig) -> Iterator[tuple[str, str, Any, str]]:
    """Name, key and section of every model on a training engine, and the name of its FSDP section."""
    policy, reward_model = cfg.actor_rollout_ref, cfg.reward.reward_model
    yield "actor", "actor_rollout_ref.actor", policy.actor, "fsdp_config"
    if uses_reference(cfg):
        yield "ref", "actor_rollout_ref.ref", policy.ref, "fsdp_config"
    if uses_critic(cfg):
        yield "critic", "critic", cfg.critic, "fsdp"
    if uses_reward_model(cfg):
        yield "rm", "reward.reward_model", reward_model, "fsdp_config"


def roles(cfg: PPOTrainerConfig | SupervisedConfig) -> Iterator[EngineRole]:
    """The models that a run holds on a training backend; a supervised run holds one."""
    if not isinstance(cfg, PPOTrainerConfig):
        yield role_of_supervised(cfg)
        return
    policy, model, pools = cfg.actor_rollout_ref, cfg.reward.reward_model, Pools.of(cfg)
    held = {
        "actor": (policy.model.path, _adapter(_MODEL, policy.model), _MODEL, policy.model),
        "ref": (policy.model.path, None, _MODEL, policy.model),
        "critic": (cfg.critic.model.path, _adapter("critic.model", cfg.critic.model), "critic.model", cfg.critic.model),
        "rm": (model.model_path, None, "reward.reward_model", model),
    }
    # First: what is keyed by the section is of the reference policy, if there is one.
    for teacher in teachers_in_roles(cfg):
        pool, ref = pools.of_role(teacher.pool), policy.ref
        if not (uses_reference(cfg) and pool == pools.of_role("ref")):
            of_fsdp = (f"{_REF}.fsdp_config", ref.fsdp_config)
            bare = replace(policy.model, lora_rank=0, lora_adapter_path=None, lora_base_quantization=None)
            yield EngineRole(_REF, ref, of_fsdp, teacher.path, pool.name, pool.size, model_key=_TEACHERS, model=bare)
    for name, key, section, fsdp in trained_roles(cfg):
        pool, (path, adapter, model_key, settings) = pools.of_role(name), held[name]
        others = (f"{key}.{fsdp}", section[fsdp])
        yield EngineRole(
            key, section, others, path, pool.name, pool.size, adapter=adapter, model_key=model_key, model=settings
        )


def role_of_supervised(cfg: SupervisedConfig) -> EngineRole:
    """The one model of a supervised run."""
    started = "what torchrun starts (--nproc_per_node)"
    others, world = ("engine", cfg.engine), env.get_int("WORLD_SIZE", 1)
    adapter = _adapter("model", cfg.model)
    return EngineRole("engine", cfg.engine, others, cfg.model.path, "", world, started, adapter, "model", cfg.model)


def _adapter(key: str, model: HFModelConfig) -> str | None:
    return next((f"{key}.{name}" for name in ("lora_rank", "lora_adapter_path") if model[name]), None)


def refuse_without_cuda(on_megatron: Iterable[EngineRole], device: str, external_lib: str | None) -> None:
    """Raise `ConfigError` for a role on Megatron-Core where nothing answers its CUDA calls.

    Args:
        device: of the workers.
        external_lib: a module of the user's, which may answer them.
    """
    for role in on_megatron:
        if role.is_megatron and device != "cuda" and not external_lib:
            raise ConfigError(
                f"Megatron-Core calls CUDA, and this run is on {device}",
                key=f"{role.key}.strategy",
                got="megatron",
                allowed=f"plain (one process), fsdp or fsdp2 on {device}",
                fix="Leave it out, or run on a machine with CUDA. A module that answers these calls instead belongs in "
                "external_lib of the model.",
            )
