"""Placement: the processes of a run, its roles with their parallel sizes, and its sampling replicas.

A value made from the configuration, before anything is allocated. The trainer builds pools, worker groups and samplers
by it; `str` is the table that a run prints when it starts.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import wraps
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from verl import registry
from verl.config.machine.pools import (
    OWN_PROCESSES,
    Pools,
    PoolSpec,
    ReplicaSpec,
    addresses_of,
    largest,
    sizes,
    spec_of,
    starts_no_engine,
    trained_roles,
)
from verl.config.machine.pools import problems as problems_of_pools
from verl.config.rules.checks import Problems, divisors_of, raise_all
from verl.config.schema.node import ConfigNode
from verl.config.schema.root import PPOTrainerConfig, teachers_in_roles
from verl.config.schema.torchtitan import SIZES as TITAN_SIZES
from verl.errors import ConfigError, hide_in_text
from verl.metrics import notice

if TYPE_CHECKING:
    from verl.config.schema.rollout import RolloutConfig

T = TypeVar("T")


def per_config(function: Callable[[Any], T]) -> Callable[[Any], T]:
    """Remembers the answer of a function of one configuration for as long as that object lives."""
    cache: dict[int, tuple[weakref.ref[Any], T]] = {}

    @wraps(function)
    def answer(config: ConfigNode) -> T:
        key = id(config)
        entry = cache.get(key)
        if entry is None or entry[0]() is not config:
            entry = cache[key] = weakref.ref(config, lambda _: cache.pop(key, None)), function(config)
        return entry[1]

    return answer


IN_PLACE, COLOCATED, CHILD, OWN_POOL, HTTP = "in place", "colocated", "child process", "own pool", "HTTP"
"""Where a replica lives: this process; a trainer's process, in turn with it; a child of that; a pool without trainers; a
server that runs already."""
SAME_PROCESS = "naive"
"""The `checkpoint_engine.backend` of samplers that live in the trainer's process."""
_ONE_MACHINE = ("shared_memory", "cuda_ipc")
"""Transports that do not leave a machine."""
_SHOWN = 8
"""Rows of replicas that the table shows at most."""
_R = "actor_rollout_ref.rollout"
_BACKEND = f"{_R}.checkpoint_engine.backend"


@dataclass(frozen=True)
class Sizes:
    """How the processes of a role share its work.

    Args:
        data: parts into which a batch is cut.
        tensor, pipeline, sequence: processes that share the linear layers, the depth, the sequences of one part.
        expert: processes that share the experts of a mixture.
    """

    data: int
    tensor: int = 1
    pipeline: int = 1
    sequence: int = 1
    expert: int = 1


@dataclass(frozen=True)
class RolePlacement:
    """A role and the pool that holds it.

    Args:
        backend: training engine, or the sampler of the role ``rollout``.
    """

    name: str
    pool: str
    backend: str
    sizes: Sizes


@dataclass(frozen=True)
class PlacedReplica:
    """One sampling engine.

    Args:
        number: counts from 0.
        placement: `IN_PLACE`, `COLOCATED`, `CHILD`, `OWN_POOL` or `HTTP`.
        pool: that holds it; empty for a server.
        ranks: its processes in that pool.
        fed_by: rank of the actor that sends it weights.
        address: of a server.
    """

    number: int
    placement: str
    pool: str
    ranks: tuple[int, ...]
    fed_by: int
    address: str = field(default="", repr=False)

    @property
    def leader(self) -> int | None:
        """The rank that answers requests for it; None for a server."""
        return self.ranks[0] if self.ranks else None


class AddedRole(Protocol):
    """A model that a recipe adds to a run; ``pool`` is its name in ``trainer.resource_pools``."""

    name: str
    pool: str
    strategy: str
    fsdp: Any
    megatron: Any


@dataclass(frozen=True)
class Topology:
    """The processes of a run and what they hold.

    Args:
        runtime: ``local`` (this process) or ``ray``.
        pools: those in which some role lives, the trainers' first.
        parts: the roles, ``actor`` first.
        engine: ``rollout.name``.
        spec: of every replica; servers that run already have sizes of their own.
        replicas: by number.
        loops: processes that run agent loops and nothing else; 0: the first one that samples runs them.

    Example:
        >>> print(Topology.of(config))
        >>> Topology.of(config).part("critic").sizes.data
        8
    """

    runtime: str
    pools: tuple[PoolSpec, ...]
    parts: tuple[RolePlacement, ...]
    engine: str
    spec: ReplicaSpec
    replicas: tuple[PlacedReplica, ...]
    loops: int = 0

    @classmethod
    def of(cls, cfg: PPOTrainerConfig, added: Iterable[AddedRole] = ()) -> Topology:
        """The topology that a configuration means.

        Args:
            added: roles that the schedule brings.

        Raises:
            ConfigError: there is none; each problem with the numbers that do not fit.
        """
        raise_all(problems(cfg))
        pools, spec = Pools.of(cfg), spec_of(cfg.actor_rollout_ref.rollout)
        parts = [*_trained(cfg, pools), *(_added(role, pools) for role in added)]
        samplers = pools.of_role("rollout")
        sampling = RolePlacement("rollout", samplers.name, cfg.actor_rollout_ref.rollout.name, Sizes(1))
        parts.insert(1, sampling)
        used = {part.pool for part in parts}
        lived_in = tuple(pool for name, pool in pools.by_name.items() if name in used)
        runtime = _runtime(cfg, lived_in)
        replicas = _replicas(cfg, spec, samplers, runtime, pools.of_role("actor").size)
        rollout = cfg.actor_rollout_ref.rollout
        loops = rollout.agent.num_workers if runtime == "ray" and rollout.agent.num_workers > 1 else 0
        return cls(runtime, lived_in, tuple(parts), rollout.name, spec, replicas, loops)

    def pool(self, name: str) -> PoolSpec:
        return next(pool for pool in self.pools if pool.name == name)

    def part(self, role: str) -> RolePlacement:
        """Of a role by its name in the dataflow: actor, rollout, ref, critic, rm, or that of a recipe."""
        return next(part for part in self.parts if part.name == role)

    def pool_of(self, role: str) -> PoolSpec:
        return self.pool(self.part(role).pool)

    @property
    def processes(self) -> int:
        """Over all pools."""
        return sum(pool.size for pool in self.pools)

    def fed_by(self, rank: int) -> tuple[PlacedReplica, ...]:
        """The replicas to which a rank of the actor sends weights."""
        return tuple(replica for replica in self.replicas if replica.fed_by == rank)

    def __str__(self) -> str:
        return "\n\n".join([self._heading(), self._pools(), self._parts(), self._replicas()])

    def _heading(self) -> str:
        where = "in this process" if self.runtime == "local" else "on Ray"
        loops = f", and {self.loops} without a device for agent loops" if self.loops else ""
        return f"{_count(self.processes, 'process', 'processes')} {where}{loops}"

    def _pools(self) -> str:
        rows = [["pool", "processes", "roles"]]
        for pool in self.pools:
            roles = [part.name for part in self.parts if part.pool == pool.name and self._has_processes(part)]
            rows.append([pool.name, " + ".join(map(str, pool.processes)), ", ".join(roles)])
        return _table(rows)

    def _has_processes(self, part: RolePlacement) -> bool:
        return part.name != "rollout" or any(replica.pool for replica in self.replicas)

    def _parts(self) -> str:
        rows = [["role", "pool", "backend", "data", "tensor", "pipeline", "sequence", "expert"]]
        for part in self.parts:
            if part.name != "rollout":
                s = part.sizes
                sizes = [s.data, s.tensor, s.pipeline, s.sequence, s.expert]
                rows.append([part.name, part.pool, part.backend, *map(str, sizes)])
        return _table(rows)

    def _replicas(self) -> str:
        rows = [["replica", "placement", "processes", "engine", "data", "tensor", "pipeline", "expert", "weights from"]]
        for replica in self.replicas:
            spec = self.spec
            sizes = ["-"] * 4 if replica.address else [spec.data, spec.tensor, spec.pipeline, spec.expert]
            where = hide_in_text(replica.address) or f"{replica.pool} {_span(replica.ranks)}"
            rows.append([str(replica.number), replica.placement, where, self.engine, *map(str, sizes),
                         f"actor {replica.fed_by}"])  # fmt: skip
        if len(rows) > _SHOWN + 1:
            rows[_SHOWN:-1] = [["..."] + [""] * (len(rows[0]) - 1)]
        return _table(rows)


def problems(cfg: PPOTrainerConfig) -> Problems:
    """Every reason why a configuration has no topology, each with its arithmetic."""
    return list(_problems(cfg))


@per_config
def _problems(cfg: PPOTrainerConfig) -> Problems:
    problems = problems_of_pools(cfg) + sizes(_R, cfg.actor_rollout_ref.rollout)
    if problems:
        return problems
    pools = Pools.of(cfg)
    if any(pool.size < 1 for pool in pools.by_name.values()):
        return []  # numbers below 1 are refused for themselves
    return _sampler_pool_problems(cfg, pools) + _local_processes(cfg, pools) + _shares(cfg, pools)


def added_roles(cfg: PPOTrainerConfig) -> list[Any]:
    """Teachers in roles, and the models that the run's schedule, which a recipe may bring, adds; built-in ones add none."""
    named = cfg.trainer.v1.trainer_mode
    builtin = registry.SCHEDULES.builtin_targets()
    return [*teachers_in_roles(cfg), *([] if named in builtin else schedule_of(cfg).models(cfg))]


def schedule_of(cfg: PPOTrainerConfig) -> Any:
    """What ``trainer.v1.trainer_mode`` names, a `verl.trainer.ppo.schedules.Schedule`.

    Raises:
        ConfigError: it is something else.
    """
    named = str(cfg.trainer.v1.trainer_mode)
    schedule = registry.SCHEDULES.get(named)
    if not all(hasattr(schedule, name) for name in ("admission", "stages", "models", "prefetches")):
        raise ConfigError(
            "it names no schedule: a schedule is a row of data and no class",
            key="trainer.v1.trainer_mode",
            got=named,
            allowed="a verl.trainer.ppo.schedules.Schedule",
            fix=registry.NEW_SCHEDULE,
        )
    return schedule


def backend_of(strategy: str, processes: int) -> str:
    """``auto`` is the plain engine on one process, and fsdp2 on several; fsdp is fsdp2."""
    if strategy == "fsdp":
        notice("strategy=fsdp", "runs on FSDP2, whose numbers and checkpoints are the same: strategy=fsdp2")
        return "fsdp2"
    if strategy != "auto":
        return strategy
    return "plain" if processes == 1 else "fsdp2"


def sizes_of(backend: str, fsdp: Any, megatron: Any, processes: int, torchtitan: Any = None) -> Sizes:
    """How ``processes`` share a model.

    Args:
        fsdp, megatron, torchtitan: the section of the backends that shard by FSDP, and those of the others.
    """
    if backend == "torchtitan" and torchtitan is not None:
        tensor, context, pipeline = (max(1, torchtitan[name]) for name in TITAN_SIZES)
        parts = max(1, processes // (tensor * context * pipeline))
        return Sizes(parts, tensor, pipeline, sequence=context, expert=torchtitan.expert_parallel_size)
    if backend == "megatron":
        tensor, pipeline = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
        context = max(1, megatron.context_parallel_size)
        parts = processes // max(1, tensor * pipeline * context)
        return Sizes(max(1, parts), tensor, pipeline, sequence=context, expert=megatron.expert_model_parallel_size)
    sequence = max(1, fsdp.ulysses_sequence_parallel_size)
    return Sizes(max(1, processes // sequence), sequence=sequence, expert=fsdp.expert_parallel_size)


def _trained(cfg: PPOTrainerConfig, pools: Pools) -> Iterator[RolePlacement]:
    for name, _, section, fsdp in trained_roles(cfg):
        pool = pools.of_role(name)
        backend = backend_of(section.strategy, pool.size)
        titan = section.torchtitan if "torchtitan" in section else None
        sizes = sizes_of(backend, section[fsdp], section.megatron, pool.size, titan)
        yield RolePlacement(name, pool.name, backend, sizes)


def _added(role: AddedRole, pools: Pools) -> RolePlacement:
    pool = pools.of_role(role.pool)
    backend = backend_of(role.strategy, pool.size)
    titan = getattr(role, "torchtitan", None)
    return RolePlacement(role.name, pool.name, backend, sizes_of(backend, role.fsdp, role.megatron, pool.size, titan))


def _runtime(cfg: PPOTrainerConfig, pools: tuple[PoolSpec, ...]) -> str:
    if cfg.trainer.runtime != "auto":
        return cfg.trainer.runtime
    return "local" if [pool.processes for pool in pools] == [(1,)] else "ray"


def _replicas(
    cfg: PPOTrainerConfig, spec: ReplicaSpec, samplers: PoolSpec, runtime: str, trainers: int
) -> tuple[PlacedReplica, ...]:
    """A replica colocated with trainers gets its weights from its own process, replica j elsewhere from rank j mod N."""
    addresses = addresses_of(cfg.actor_rollout_ref.rollout)
    if starts_no_engine(cfg.actor_rollout_ref.rollout):
        return tuple(PlacedReplica(j, HTTP, "", (), j % trainers, address) for j, address in enumerate(addresses))
    placement, each = _placement_of(cfg, samplers, runtime), processes_of(cfg.actor_rollout_ref.rollout, samplers.size)
    ranks = [tuple(range(first, first + each)) for first in range(0, samplers.size - each + 1, each)]
    return tuple(
        PlacedReplica(j, placement, samplers.name, members, j % trainers if placement == OWN_POOL else members[0])
        for j, members in enumerate(ranks)
    )


def _placement_of(cfg: PPOTrainerConfig, samplers: PoolSpec, runtime: str) -> str:
    rollout = cfg.actor_rollout_ref.rollout
    if samplers != Pools.of(cfg).of_role("actor"):
        return OWN_POOL
    if rollout.checkpoint_engine.backend != SAME_PROCESS or rollout.name == "sglang":
        return CHILD
    return IN_PLACE if runtime == "local" else COLOCATED


def processes_of(rollout: RolloutConfig, processes: int) -> int:
    """How many of a pool's processes one replica takes."""
    return 1 if processes == 1 and rollout.name in OWN_PROCESSES else spec_of(rollout).devices


# ---- what cannot be ------------------------------------------------------------------------------------------------


def _sampler_pool_problems(cfg: PPOTrainerConfig, pools: Pools) -> Problems:
    """Engines that cannot live in a pool of their own, or not with the transport that is set."""
    rollout, key = cfg.actor_rollout_ref.rollout, f"{_R}.name"
    if "rollout" not in pools.named:
        return []
    if starts_no_engine(rollout):
        message = f"{_count(len(addresses_of(rollout)), 'server')} sample, and the pool has no process of theirs"
        fix = "Leave out actor_rollout_ref.hybrid_engine, and the role rollout in trainer.resource_pools."
        return [ConfigError(message, key=key, got=rollout.name, fix=fix)]
    return _between_pools(cfg, pools)


def _between_pools(cfg: PPOTrainerConfig, pools: Pools) -> Problems:
    """A transport that reaches from the trainers' processes to the samplers'."""
    backend, below = _carrier(cfg)
    nodes = max(len(pools.of_role(role).processes) for role in ("actor", "rollout"))
    if backend == SAME_PROCESS:
        message = "the samplers have a pool of their own, and naive hands weights over inside one process"
        reach = [name for name in registry.TRANSPORTS.names() if name != "cuda_ipc" and _reaches(name, nodes)]
        fix = f"Set {_BACKEND}={'shared_memory' if nodes == 1 else 'gloo'}."
        return [ConfigError(message, key=_BACKEND, got=backend, allowed=reach, fix=fix)]
    if below == "cuda_ipc":
        message = "the samplers have devices of their own, and cuda_ipc connects processes that share one"
        return [ConfigError(message, key=_BACKEND, got=backend, fix=f"Set {_BACKEND}=nccl.")]
    return beyond_one_machine(cfg, f"the trainers or the samplers have {nodes} nodes", nodes)


def beyond_one_machine(cfg: PPOTrainerConfig, where: str, nodes: int) -> Problems:
    """A transport of one machine for processes on several.

    Args:
        where: which roles span how many nodes, for the message.
    """
    backend, below = _carrier(cfg)
    if _reaches(below, nodes):
        return []
    message = f"{where}, and {backend} reaches the processes of one machine"
    if below != backend:
        message += f": its bytes travel over {below}, unless engine_kwargs names another with over=..."
    reach = [name for name in registry.TRANSPORTS.names() if _reaches(name, nodes)]
    return [ConfigError(message, key=_BACKEND, got=backend, allowed=reach, fix=f"Set {_BACKEND}=gloo.")]


def _reaches(transport: str, nodes: int) -> bool:
    return nodes == 1 or transport not in _ONE_MACHINE


def _carrier(cfg: PPOTrainerConfig) -> tuple[str, str]:
    """The transport that is set, and the one over which its bytes go."""
    engine = cfg.actor_rollout_ref.rollout.checkpoint_engine
    backend, options = engine.backend, engine.engine_kwargs
    options = options[backend] if isinstance(options.get(backend), dict) else options
    return backend, options.get("over", "shared_memory") if backend.startswith("delta") else backend


def _local_processes(cfg: PPOTrainerConfig, pools: Pools) -> Problems:
    """``runtime=local`` is one process for every pool."""
    others = [pool for pool in pools.by_name.values() if pool.processes != (1,)]
    if cfg.trainer.runtime != "local" or not (others or "rollout" in pools.named):
        return []
    sizes = ", ".join(f"{name} {' + '.join(map(str, pool.processes))}" for name, pool in pools.by_name.items())
    return [
        ConfigError(
            "a run in this process cannot have several",
            key="trainer.runtime",
            got=f"local, with {sizes}",
            fix="Set trainer.runtime=ray, or trainer.nnodes=1 trainer.n_gpus_per_node=1.",
        )
    ]


def _shares(cfg: PPOTrainerConfig, pools: Pools) -> Problems:
    """The samplers' processes divide into replicas, each of them on one node."""
    rollout, pool = cfg.actor_rollout_ref.rollout, pools.of_role("rollout")
    if starts_no_engine(rollout):
        return []
    spec, each = spec_of(rollout), processes_of(rollout, pool.size)
    uneven = [count for count in (pool.size, *pool.processes) if count % each]
    if not uneven or (pool.size % each == 0 and rollout.name not in OWN_PROCESSES):
        return []
    key, processes = largest(_R, rollout), uneven[0]
    held, left = divmod(processes, each)
    where = "" if processes == pool.size else " of a node"
    verb = "holds" if processes == 1 else "hold"
    message = f"{_count(processes, 'process', 'processes')}{where} {verb} {_count(held, 'replica')} of {spec} = {each}"
    message += f", and {left} of them would hold nothing"
    got = rollout[key.rpartition(".")[2]]
    allowed = divisors_of(processes) if got == each else f"sizes whose product divides {processes}"
    fix = f"Change it, or the number of processes ({_setting_of(cfg, pools)})."
    return [ConfigError(message, key=key, got=got, allowed=allowed, fix=fix)]


def _setting_of(cfg: PPOTrainerConfig, pools: Pools) -> str:
    """What says how many processes sample."""
    if "rollout" not in pools.named:
        return "trainer.nnodes, trainer.n_gpus_per_node"
    pool = pools.named["rollout"]
    if pool in cfg.trainer.resource_pools:
        return f"trainer.resource_pools.{pool}.processes"
    return f"{_R}.nnodes, {_R}.n_gpus_per_node"


# ---- the table -----------------------------------------------------------------------------------------------------


def _table(rows: list[list[str]]) -> str:
    """Left-aligned columns, two spaces apart."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def _span(ranks: tuple[int, ...]) -> str:
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
