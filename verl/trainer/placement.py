"""Which role runs in which processes: the pools of a run, from the configuration.

One pool holds every role (colocated: they take turns on the same devices), and ``trainer.resource_pools`` gives roles
processes of their own (split). Neither changes a number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl import device
from verl.config import PPOTrainerConfig
from verl.config.root import uses_critic, uses_reference, uses_reward_model
from verl.registry import SCHEDULES
from verl.single_controller.base import ResourcePool, ResourcePoolManager, Role
from verl.single_controller.local import LocalWorkerGroup
from verl.workers import ActorRolloutRefWorker, CriticWorker, RewardModelWorker
from verl.workers.model import ModelRole, ModelWorker

GLOBAL_POOL = "global_pool"
REWARD_POOL = "reward_pool"


@dataclass(frozen=True)
class Place:
    """Where the workers of a run live; `runtime.enter` makes it.

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


def processes_per_node(config: PPOTrainerConfig) -> int:
    """``trainer.n_gpus_per_node``; left out, one."""
    return 1 if config.trainer.n_gpus_per_node is None else config.trainer.n_gpus_per_node


def pool_sizes(config: PPOTrainerConfig) -> dict[str, list[int]]:
    """Processes per node of every pool in which a role of this run lives."""
    used = set(_pool_of_roles(config).values())
    sizes = {GLOBAL_POOL: [processes_per_node(config)] * config.trainer.nnodes}
    sizes |= {name: list(pool["processes"]) for name, pool in config.trainer.resource_pools.items()}
    model = config.reward.reward_model
    sizes[REWARD_POOL] = [model.n_gpus_per_node] * model.nnodes
    return {name: counts for name, counts in sizes.items() if name in used}


def strategy(named: str, processes: int) -> str:
    """``auto`` is the plain engine on one process, and fsdp2 on several."""
    if named != "auto":
        return named
    return "plain" if processes == 1 else "fsdp2"


def role_worker_mapping(config: PPOTrainerConfig) -> dict[Role | str, type]:
    """Which worker class plays which role; a reference policy in a pool of its own is a role of its own."""
    if not uses_reference(config):
        mapping: dict[Role | str, type] = {Role.ActorRollout: ActorRolloutRefWorker}
    elif "ref" in _named_roles(config):
        mapping = {Role.ActorRollout: ActorRolloutRefWorker, Role.RefPolicy: ActorRolloutRefWorker}
    else:
        mapping = {Role.ActorRolloutRef: ActorRolloutRefWorker}
    if uses_critic(config):
        mapping[Role.Critic] = CriticWorker
    if uses_reward_model(config):
        mapping[Role.RewardModel] = RewardModelWorker
    return mapping | {role.name: ModelWorker for role in added_roles(config)}


def added_roles(config: PPOTrainerConfig) -> list[ModelRole]:
    """The models that the run's schedule, which a recipe may bring, adds to the library's roles."""
    return SCHEDULES.get(config.trainer.v1.trainer_mode).added_roles(config)


def resource_pools(config: PPOTrainerConfig, place: Place | None = None) -> ResourcePoolManager:
    """The pools of a run and the roles in them.

    Raises:
        ConfigError: the machines do not have what the pools ask for.
    """
    place = place or Place(device=device.resolve_device(config.trainer.device))
    return ResourcePoolManager(
        resource_pool_spec=pool_sizes(config),
        mapping=_pool_of_roles(config),
        device_kind=place.device,
        devices_per_node=place.devices_per_node,
        pool_class=place.pool_class,
    )


def _pool_of_roles(config: PPOTrainerConfig) -> Mapping[Role | str, str]:
    named = _named_roles(config)
    pooled = {role.name: role.pool for role in added_roles(config)}
    return {role: named.get(pooled.get(str(role), str(role)), GLOBAL_POOL) for role in role_worker_mapping(config)}


def _named_roles(config: PPOTrainerConfig) -> dict[str, str]:
    own = {str(Role.RewardModel): REWARD_POOL} if config.reward.reward_model.enable_resource_pool else {}
    return own | dict(_roles_and_pools(config.trainer.resource_pools))


def _roles_and_pools(pools: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, pool in pools.items():
        for role in pool["roles"]:
            yield role, name
