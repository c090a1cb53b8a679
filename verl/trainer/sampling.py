"""The replicas of a run and the handles by which the first rollout worker and the trainers reach them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl.config import PPOTrainerConfig
from verl.config.topology import OWN_POOL
from verl.trainer.placement import topology_of
from verl.workers.sampling import ReplicaWorker, senders


def connect(config: PPOTrainerConfig, groups: Mapping[str, Any], device: str) -> None:
    """Tell the first rollout worker of the replicas in other processes, and the actors of those in another pool.

    Args:
        groups: role -> worker group, whose models are loaded.
        device: of the actors.
    """
    group, replicas = groups.get("rollout"), topology_of(config).replicas
    leaders = [replica.leader for replica in replicas if replica.leader is not None]
    if group is None or not leaders:
        return
    handles = {ReplicaWorker.replica_name(rank): group.handle(rank) for rank in leaders}
    if any(replica.placement == OWN_POOL for replica in replicas):
        actors = groups["actor"]
        actors.feed(senders(config.actor_rollout_ref, device, handles, actors.world_size))
    others = list(handles)[1:]
    if others:
        group.connect({name: handles[name] for name in others})
