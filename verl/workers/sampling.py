"""The workers that sample: one holds a replica, the first of them runs agent loops over all replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from verl import distributed
from verl.agent_loop import AgentLoopManager
from verl.config import ActorRolloutRefConfig, DataConfig, PPOTrainerConfig, ProfilerConfig
from verl.config.topology import processes_of
from verl.data import tokenizer_of
from verl.metrics import Metric
from verl.protocol import DataProto
from verl.rollout.base import Completion, Request, Sampler
from verl.rollout.devices import of_replica
from verl.rollout.hosted import HostedSampler, RemoteSampler, SamplerHost
from verl.rollout.place import make_sampler, server_sampler, servers_of, transport_of
from verl.rollout.service import SamplerService
from verl.single_controller.base import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.single_controller.base.handle import Handle
from verl.workers.part import WorkerContext, local_model, memory_of
from verl.workers.profiling import ProfiledWorker, profiled
from verl.workers.scoring import early_scorer
from verl.workers.sending import SyncResult, WeightSender


def senders(
    policy: ActorRolloutRefConfig, device: str, replicas: Mapping[str, Handle], ranks: int
) -> list[WeightSender]:
    """What each of ``ranks`` actors sends weights by to replicas of another pool: replica j is fed by rank j mod N.

    Args:
        replicas: name -> handle on its `ReplicaWorker`.
        device: of the actors.
    """
    kind, begin = transport_of(policy.rollout, policy.model, device)
    hosted = [(name, HostedSampler(handle, kind, begin)) for name, handle in replicas.items()]
    return [WeightSender(policy.rollout, policy.model, dict(hosted[rank::ranks])) for rank in range(ranks)]


class ReplicaWorker(ProfiledWorker):
    """One process of the pool in which replicas sit, and the replica that it holds.

    Beside a rank of the actor it holds a replica in this process or in a child of it, and its weights come from that
    rank. In a pool of its own they come by a transport (`take_weights`). Servers that run already are nobody's: the
    ranks share out who loads which, and each is loaded once.

    Args:
        config: the section ``actor_rollout_ref`` of the configuration.
        context: device and the peers' time-out.
    """

    def __init__(self, config: ActorRolloutRefConfig, context: WorkerContext | None = None):
        super().__init__()
        self.config, self.context = config, context or WorkerContext()

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
        self.sender = WeightSender(self.config.rollout, self.model, {name: self.replicas[name] for name in fed})

    def _start_replica(self) -> list[str]:
        """The name of the replica that this rank leads; the others lend theirs the devices that they see."""
        rollout, device = self.config.rollout, self.context.device
        each = processes_of(rollout, self.world_size)
        devices: list[str] = []
        if each > 1:
            ranks = distributed.start(self.info, device, self.context.timeout)
            devices = of_replica(ranks, self.info.local_rank, each)
        if self.rank % each:
            self.replicas = {}
            return []
        name = self.replica_name(self.rank)
        self.replicas = {name: make_sampler(rollout, self.model, device, self.is_beside, devices)}
        self.host = SamplerHost(self.replicas[name], device)
        return [name]

    def _server(self, url: str, number: int) -> Sampler:
        return server_sampler(url, self.config.rollout, self.model, is_alone=number == 1)

    @staticmethod
    def replica_name(rank: int) -> str:
        """For messages and statistics."""
        return f"replica of rollout[{rank}]"

    @property
    def is_beside(self) -> bool:
        """Whether the actor lives in this process, too: the two use its devices in turn."""
        return "actor" in self.fused_worker_dict

    # ---- what the service asks of a replica elsewhere ----------------------------------------------------------

    async def generate(self, request: Request) -> Completion:
        return await self.host.generate(request)

    async def abort(self, request_ids: list[str] | None = None) -> int:
        return await self.host.abort(request_ids)

    async def sleep(self, level: int = 1) -> None:
        await self.host.sleep(level)

    async def wake(self) -> None:
        await self.host.wake()

    async def status(self) -> dict[str, Any]:
        """``version`` of the replica's weights, and its ``stats``."""
        return await self.host.status()

    async def take_weights(self, kind: str, address: Mapping[str, Any], version: int) -> int:
        """Receive weights from the trainer's end of a transport; the version that is in use then."""
        return await self.host.take_weights(kind, address, version)


class RolloutWorker(ReplicaWorker):
    """A `ReplicaWorker` of which the first runs the agent loops of all rows, over the service of all replicas.

    Args:
        config: the section ``actor_rollout_ref`` of the configuration.
        context: device and the peers' time-out.
        data: the section ``data``, for agent loops that render messages.
        scoring: the whole configuration, where samples are scored beside sampling; None: after it, by the controller.
    """

    def __init__(
        self,
        config: ActorRolloutRefConfig,
        context: WorkerContext | None = None,
        data: DataConfig | None = None,
        scoring: PPOTrainerConfig | None = None,
    ):
        super().__init__(config, context)
        self.data, self.scoring = data, scoring
        self.bytes_sent = 0.0

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Start the replica, and in the first process the agent loops; they know this process's replica so far."""
        super().init_model()
        self.set_dispatch_collect("rollout", 0, self.rank == 0)  # all get the rows, the first one answers
        if self.rank == 0:
            self.tokenizer = tokenizer_of(self.model)
            self._serve()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def connect(self, others: dict[str, Handle]) -> None:
        """Sample with replicas of other processes, too; servers are known already.

        Args:
            others: `replica_name` of each other rank that leads a replica -> handle on its `ReplicaWorker`.
        """
        if self.rank > 0 or servers_of(self.config.rollout):
            return
        for name, handle in others.items():
            asyncio.run(self.service.add(name, RemoteSampler(handle)))

    def _serve(self) -> None:
        rollout = self.config.rollout
        attempts, slots = rollout.server.max_attempts, rollout.max_num_seqs
        self.service = SamplerService(self.replicas, max_resends=attempts, slots=slots)
        early = None if self.scoring is None else early_scorer(self.scoring, self.tokenizer, 1)
        self.agent_loops = AgentLoopManager(
            rollout,
            self.service,
            self.tokenizer,
            data_config=self.data,
            score_row=None if early is None else early.score,
        )

    def profiling(self) -> tuple[str, ProfilerConfig | None]:
        return "rollout", self.config.rollout.profiler

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def publish(self, version: int, sent: SyncResult) -> None:
        """Sample with a version that the actor has sent."""
        self.bytes_sent = sent.num_bytes
        if self.rank == 0:
            asyncio.run(self.service.publish(version, sent.failed))

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="rollout"))
    @profiled
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Run the agent loop of every row: responses, masks and the sampler's own log-probs."""
        if self.rank > 0:
            return prompts[:0]
        with memory_of("generate", self.context.device) as memory:
            asyncio.run(self.service.wake())
            try:
                made = self.agent_loops.generate_sequences(prompts)
            finally:
                if self._frees_cache():
                    asyncio.run(self.service.sleep(level=1))
        sent = {"perf/weights_sent_mb": Metric(self.bytes_sent / 1e6, "max")}
        made.meta_info["metrics"] = {**made.meta_info.get("metrics", {}), **memory, **sent}
        return made

    def _frees_cache(self) -> bool:
        """Whether replicas give their caches back to the trainers between rollouts."""
        asked = self.config.rollout.free_cache_engine
        return self.is_beside and self.context.device != "cpu" if asked is None else asked
