"""Connects the sampling processes of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from verl.config import PPOTrainerConfig
from verl.config.machine.topology import OWN_POOL, Topology, beyond_one_machine
from verl.config.rules.checks import raise_all
from verl.metrics import notice
from verl.single_controller.base import ClassWithInitArgs, WorkerGroup, by_rank, collected
from verl.single_controller.base.handle import Handle
from verl.trainer.keeper import ReplicaKeeper
from verl.trainer.placement import topology_of
from verl.workers.loops import RolloutWorker
from verl.workers.model import ModelWorker
from verl.workers.replica import ReplicaWorker
from verl.workers.sampling import SamplingWorker
from verl.workers.sending import senders

LOOPS = "agent_loop"
"""Name of the processes that run agent loops."""


def connect(
    config: PPOTrainerConfig,
    groups: Mapping[str, WorkerGroup],
    device: str,
    keeper: ReplicaKeeper | None = None,
) -> None:
    """Start the processes that run agent loops, and connect the first sampling worker to them and to all replicas.

    Args:
        groups: role -> worker group, whose models are loaded. The actors are connected to replicas in another pool.
        device: of the actors.
        keeper: of replicas that are replaced; they are started here. None: the group of the samplers has them.
    """
    group, topology = groups.get("rollout"), topology_of(config)
    if group is None:
        return
    if keeper is not None:
        keeper.start()
        hosts = _hosts(config, groups["actor"].addresses, keeper.addresses)
        sending = senders(config.actor_rollout_ref, device, keeper.handles, keeper.feeds(), hosts)
        by_rank(groups["actor"], ModelWorker.feed)(sending)
        collected(group, SamplingWorker.connect)(keeper.handles, _start_loops(config, topology, group))
        return
    leaders = [replica.leader for replica in topology.replicas if replica.leader is not None]
    handles: dict[str, Handle] = {ReplicaWorker.replica_name(rank): group.handle(rank) for rank in leaders}
    is_separate = any(replica.placement == OWN_POOL for replica in topology.replicas)
    if is_separate:
        hosts = _hosts(config, groups["actor"].addresses, group.addresses)
        sending = senders(config.actor_rollout_ref, device, handles, _feeds(topology), hosts)
        by_rank(groups["actor"], ModelWorker.feed)(sending)
    others = dict(list(handles.items())[1:])
    loops = _start_loops(config, topology, group)
    if others or loops or is_separate:
        collected(group, SamplingWorker.connect)(others, loops)


def _feeds(topology: Topology) -> list[list[str]]:
    """Names of the replicas that each rank of the actor sends weights to."""
    fed = [topology.fed_by(rank) for rank in range(topology.pool_of("actor").size)]
    return [[ReplicaWorker.replica_name(replica.ranks[0]) for replica in replicas] for replicas in fed]


def _hosts(config: PPOTrainerConfig, actors: Sequence[str], samplers: Sequence[str]) -> list[str | None]:
    """The address of each actor's machine where its samplers may be on another one; None where all are on one.

    Raises:
        ConfigError: the cluster put them on several machines, and the transport reaches one.
    """
    machines = {*actors, *samplers}
    if len(machines) == 1:
        return [None] * len(actors)
    where = f"the trainers and the samplers lie on {len(machines)} machines ({', '.join(sorted(machines))})"
    raise_all(beyond_one_machine(config, where, len(machines)))
    return list(actors)


def _start_loops(config: PPOTrainerConfig, topology: Topology, group: WorkerGroup) -> Sequence[Handle]:
    key = "actor_rollout_ref.rollout.agent.num_workers"
    if not topology.loops:
        if config.actor_rollout_ref.rollout.agent.num_workers > 1:
            notice(key, "has no effect in a run of one process, which runs all agent loops: set trainer.runtime=ray")
        return []
    made = ClassWithInitArgs(
        RolloutWorker, config.actor_rollout_ref, config.data, service=group.handle(0), processes=topology.loops
    )
    return group.start_helpers(made, topology.loops, LOOPS, config.trainer.seed)
