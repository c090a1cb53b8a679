"""The worker of one process with a replica."""

from __future__ import annotations

from collections.abc import Mapping

from verl import distributed
from verl.config import ActorRolloutRefConfig
from verl.config.machine.topology import processes_of
from verl.rollout.base import Sampler
from verl.rollout.devices import of_replica
from verl.rollout.hosted import WeightIntake
from verl.rollout.place import place_sampler, server_sampler, servers_of
from verl.single_controller.base import Dispatch, register
from verl.workers.part import WorkerContext, local_model
from verl.workers.profiling import ProfiledWorker
from verl.workers.sending import WeightSender

LARGE = 256 << 20
"""Bytes of a sampler's weights on a CPU from which on it frees its caches and copies while the trainer works: to give
memory back, and to take it again, costs more than a step of a small model."""


def frees_cache(setting: bool | None, device: str, weight_bytes: float) -> bool:
    """Whether a sampler that takes turns with a trainer frees its caches for it; ``setting``: ``free_cache_engine``."""
    return (device != "cpu" or weight_bytes >= LARGE) if setting is None else setting


class ReplicaWorker(ProfiledWorker):
    """One process of the pool with the replicas, and the replica that it holds.

    Colocated with a rank of the actor it holds a replica in this process or in a child of it, which gets its weights
    from that rank. In a separate pool they come by a transport (`take_weights`). Running servers belong to no rank:
    the ranks divide them up, and each is loaded once.

    Args:
        config: the section ``actor_rollout_ref`` of the configuration.
        context: device and the peers' time-out.
    """

    def __init__(self, config: ActorRolloutRefConfig, context: WorkerContext | None = None):
        super().__init__()
        self.config, self.context = config, context or WorkerContext()
        self.shares = False
        self.intake: WeightIntake | None = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Start the replica; one that is sent an adapter alone needs the folder of its base only.

        A replica of several processes is led by the first of them. Collective where there are such replicas.
        """
        self.model = local_model(self.config.model, "actor_rollout_ref.model.path")
        servers = servers_of(self.config.rollout)
        if servers:
            fed = servers[self.rank :: self.world_size]
            self.replicas = {url: self._server(url, len(servers)) for url in (servers if self.rank == 0 else fed)}
        else:
            fed = self._start_replica()
        fed_replicas = {name: self.replicas[name] for name in fed}
        self.sender = WeightSender(self.config.rollout, self.model, fed_replicas, shares=self.shares)

    def _start_replica(self) -> list[str]:
        """The name of the replica that this rank leads; the others give theirs the devices that they see."""
        rollout, device = self.config.rollout, self.context.device
        each = processes_of(rollout, self.world_size)
        devices: list[str] = []
        if each > 1:
            ranks = distributed.join_group(self.info, device, self.context.timeout)
            devices = of_replica(ranks, self.info.local_rank, each)
        if self.rank % each:
            self.replicas = {}
            return []
        name = self.replica_name(self.rank)
        self.replicas = {name: place_sampler(rollout, self.model, device, self.is_colocated, devices)}
        self.intake = WeightIntake(self.replicas[name], device)
        return [name]

    def _server(self, url: str, number: int) -> Sampler:
        return server_sampler(url, self.config.rollout, self.model, is_alone=number == 1)

    @staticmethod
    def replica_name(rank: int) -> str:
        """For messages and statistics."""
        return f"replica of rollout[{rank}]"

    @property
    def is_colocated(self) -> bool:
        """Whether the actor is in this process too: the two take turns on its devices."""
        return "actor" in self.fused_worker_dict

    def endpoints(self) -> Mapping[type, object]:
        """The sampler that this rank leads, and its `WeightIntake`."""
        return {} if self.intake is None else {Sampler: self.intake.sampler, WeightIntake: self.intake}
