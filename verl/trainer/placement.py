"""From the topology of a run to its worker classes and resource pools.

Roles of one pool share its processes (colocated: they take turns on the same devices). Where a role lives changes no
number.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl import device
from verl.config import PPOTrainerConfig
from verl.config.machine.topology import Topology, added_roles, per_config
from verl.config.schema.root import uses_critic, uses_reference, uses_reward_model
from verl.single_controller.base import ResourcePool, ResourcePoolManager, Role
from verl.single_controller.base.resources import unwrapped
from verl.single_controller.local import LocalWorkerGroup
from verl.workers import ActorRolloutRefWorker, ModelWorker, RewardModelWorker, SamplingWorker


@dataclass(frozen=True)
class Place:
    """Where the workers of a run live; `runtime.run_place` makes it.

    Args:
        kind: ``local`` (this process) or ``ray``.
        device: of every worker: cpu, cuda or npu.
        group_class: makes a worker group of a pool and a class.
        pool_class: makes a pool of a list of processes per node.
        devices_per_node: how many processes each node of the cluster can hold; None where nothing is counted.
    """

    kind: str = "local"
    device: str = "cpu"
    group_class: Any = LocalWorkerGroup
    pool_class: Any = ResourcePool
    devices_per_node: Sequence[int] | None = field(default=None)


@per_config
def topology_of(config: PPOTrainerConfig) -> Topology:
    """The placement of all roles in a run, including those of its schedule."""
    return Topology.of(config, added_roles(config))


def role_worker_mapping(config: PPOTrainerConfig) -> dict[Role | str, type]:
    """Which worker class plays which role; each worker holds one model."""
    mapping: dict[Role | str, type] = {Role.Actor: ModelWorker}
    if uses_reference(config):
        mapping[Role.RefPolicy] = ModelWorker
    mapping[Role.Rollout] = SamplingWorker
    if uses_critic(config):
        mapping[Role.Critic] = ModelWorker
    if uses_reward_model(config):
        mapping[Role.RewardModel] = RewardModelWorker
    return mapping | {role.name: ModelWorker for role in added_roles(config)}


def parts_of(role: Role | str, worker_class: type) -> dict[str, type]:
    """The roles behind upstream's names for several in one worker, and the class of each."""
    parts = {str(Role.ActorRollout): ("actor",), str(Role.ActorRolloutRef): ("actor", "ref")}.get(str(role))
    if parts is None:
        return {str(role): worker_class}
    return {**dict.fromkeys(parts, worker_class), "rollout": SamplingWorker}


def plain_classes(mapping: Mapping[Role | str, Any]) -> dict[Role | str, type]:
    """The worker classes themselves, where some are wrapped by ``ray.remote``."""
    return {role: unwrapped(worker_class) for role, worker_class in mapping.items()}


def samples_itself(mapping: Mapping[Role | str, type]) -> bool:
    """Whether a class of the user's for the policy has its own way to sample, which the loop then calls."""
    methods = [getattr(worker_class, "generate_sequences", None) for role, worker_class in mapping.items()
           if "actor" in parts_of(role, worker_class)]  # fmt: skip
    return any(method not in (None, ActorRolloutRefWorker.generate_sequences) for method in methods)


def random_streams(roles: Collection[str]) -> dict[str, str]:
    """Roles of one process that draw from one sequence of random numbers, and its name.

    Those of the policy do. A checkpoint holds the state of that sequence, so its name must stay as it is.
    """
    policy = {"actor", "ref", "rollout"} & set(roles) if "actor" in roles else set()
    return dict.fromkeys(policy, "actor_rollout_ref" if "ref" in policy else "actor_rollout")


def resource_pools(config: PPOTrainerConfig, place: Place | None = None) -> ResourcePoolManager:
    """The pools of a run and the roles in them.

    Raises:
        ConfigError: the machines do not have what the pools ask for.
    """
    place, topology = place or Place(device=device.resolve_device(config.trainer.device)), topology_of(config)
    return ResourcePoolManager(
        resource_pool_spec={pool.name: list(pool.processes) for pool in topology.pools},
        mapping={role: topology.part(str(role)).pool for role in role_worker_mapping(config)},
        device_kind=place.device,
        devices_per_node=place.devices_per_node,
        pool_class=place.pool_class,
    )
