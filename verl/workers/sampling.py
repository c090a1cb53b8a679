"""The role that samples: processes with replicas, of which the first holds the sampling service."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from verl.agent_loop import AgentLoopManager
from verl.config import ActorRolloutRefConfig, DataConfig, PPOTrainerConfig, ProfilerConfig
from verl.data import processor_of, tokenizer_of
from verl.metrics import Metric
from verl.outcomes import run_now
from verl.protocol import DataProto
from verl.rollout.hosted import RemoteSampler
from verl.rollout.request_spans import RequestSpans
from verl.rollout.service import SamplerService
from verl.single_controller.base import Dispatch, Execute, register
from verl.single_controller.base.handle import Handle
from verl.workers import probing
from verl.workers.loops import RemoteRunner
from verl.workers.part import WorkerContext, local_model, watched_memory
from verl.workers.profiling import profiled
from verl.workers.replica import ReplicaWorker, frees_cache
from verl.workers.scoring import early_scorer
from verl.workers.sending import SyncResult

SERVED, FOLLOW = "served", "follow"
"""Keys of ``meta_info``; see `SamplingWorker.sample_groups`."""
REPORT_SECONDS = 0.25
"""Between two reports of what requests in flight have drawn, where replicas may be lost."""
ReplicaStats = Mapping[str, Mapping[str, float]]


def balance_metrics(before: ReplicaStats, after: ReplicaStats, resent: float) -> dict[str, Metric]:
    """How several replicas shared a batch: requests that each answered, resent requests, and replicas left.

    Args:
        before, after: `SamplerService.replica_stats` around the batch; a replica may have come in between.
        resent: requests that a replica lost.
    """
    if len(after) < 2:
        return {}
    answered = [now["completed"] - before.get(name, {"completed": 0.0})["completed"] for name, now in after.items()]
    return {
        "rollout/replicas/alive": Metric(sum(1.0 - now["is_lost"] for now in after.values()), "min"),
        "rollout/replicas/resent": Metric(resent, "sum"),
        "rollout/replicas/requests/min": Metric(min(answered), "min"),
        "rollout/replicas/requests/max": Metric(max(answered), "max"),
        "rollout/replicas/requests/mean": Metric(sum(answered) / len(answered)),
    }


class SamplingWorker(ReplicaWorker):
    """A `ReplicaWorker`; the first one holds the service of all replicas, and assembles batches.

    Agent loops run in its process, or in `RolloutWorker`s that reach the service by a handle (`connect`). Where lost
    replicas are replaced, the one process has the service alone, and every replica comes from elsewhere.

    Args:
        config: the section ``actor_rollout_ref`` of the configuration.
        context: device and the peers' time-out.
        data: the section ``data``, for agent loops that render messages.
        scoring: the full configuration, to score samples during sampling; None: after it, by the controller.
        shares: sampling and training take turns, so that in one process both can use the same weights.
    """

    def __init__(
        self,
        config: ActorRolloutRefConfig,
        context: WorkerContext | None = None,
        data: DataConfig | None = None,
        scoring: PPOTrainerConfig | None = None,
        shares: bool = False,
    ):
        super().__init__(config, context)
        self.shares = shares
        self.data, self.scoring = data, scoring
        self.bytes_sent = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Start the replica, and in the first process the service, with only this process's replica so far."""
        if self.is_elastic:
            self.model, self.replicas = local_model(self.config.model, "actor_rollout_ref.model.path"), {}
        else:
            super().init_model()
        self.set_dispatch_collect("rollout", 0, self.rank == 0)  # a class of the user's may sample with this mesh
        if self.rank == 0:
            self.tokenizer = tokenizer_of(self.model)
            self.processor = processor_of(self.model, self.tokenizer, self.data and self.data.mm_processor_kwargs)
            self._serve()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    async def connect(self, replicas: dict[str, Handle], loops: Sequence[Handle] = ()) -> None:
        """Register what is in other processes, once.

        From here on requests run in this event loop where others need it too: agent loops elsewhere, and a trainer
        elsewhere whose weights arrive while requests run.

        Args:
            replicas: `replica_name` -> handle on the `ReplicaWorker` that leads it.
            loops: handles on `RolloutWorker`s; none: agent loops run in this process.
        """
        self._loop = asyncio.get_running_loop() if loops or not self.is_colocated else None
        for name, handle in replicas.items():
            await self.service.add(name, RemoteSampler(handle))
        self.agent_loops.run_in([RemoteRunner(handle) for handle in loops])

    @property
    def is_elastic(self) -> bool:
        """Whether lost replicas are replaced during the run."""
        return self.config.rollout.max_replacements > 0 and not self.is_colocated

    def endpoints(self) -> Mapping[type, object]:
        """This process's replica; in the first process also the service and the manager of the agent loops."""
        replica = super().endpoints()
        if "agent_loops" not in vars(self):  # another rank, or before `init_model`
            return replica
        service, loops = self.service, self.agent_loops
        return {**replica, SamplerService: service, RequestSpans: service.spans, AgentLoopManager: loops}

    def _serve(self) -> None:
        rollout = self.config.rollout
        attempts, slots = rollout.server.max_attempts, rollout.max_num_seqs
        self.service = SamplerService(
            self.replicas,
            max_resends=attempts,
            slots=slots,
            is_elastic=self.is_elastic,
            report_seconds=REPORT_SECONDS if self.is_elastic and not rollout.full_determinism else None,
        )
        early = None if self.scoring is None else early_scorer(self.scoring, self.tokenizer)
        self.agent_loops = AgentLoopManager(
            rollout,
            self.service,
            self.tokenizer,
            self.processor,
            data_config=self.data,
            score_row=None if early is None else early.score,
        )

    def profiling(self) -> tuple[str, ProfilerConfig | None]:
        return "rollout", self.config.rollout.profiler

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def publish(self, version: int, sent: SyncResult) -> None:
        """Sample with a version that the actor has sent."""
        self.bytes_sent = sent.num_bytes
        self._run(self.service.publish(version, sent.failed))

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def probe(self, version: int) -> DataProto:
        """A few tokens that each replica draws with the weights of ``version``, as a batch with the column ``replica``.

        Its metrics say how much memory the weights of the largest replica take, where samplers count it.
        """
        return self._run(self._awake(self._probed(version)))

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, execute_mode=Execute.RANK_ZERO)
    @profiled
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Run the agent loop of every row: responses, masks and the sampler's own log-probs."""
        before, resent = self.service.replica_stats(), self.service.stats()["resent"]
        with watched_memory("generate", self.context.device) as memory:
            batch = self._run(self._awake(self.agent_loops.generate(prompts)))
        sent = {"perf/weights_sent_mb": Metric(self.bytes_sent / 1e6, "max")}
        shared = balance_metrics(before, self.service.replica_stats(), self.service.stats()["resent"] - resent)
        batch.meta_info["metrics"] = {**batch.meta_info.get("metrics", {}), **memory, **sent, **shared}
        return batch

    async def sample_groups(self, prompts: DataProto) -> DataProto:
        """As `generate_sequences`, for a few rows, while other calls of it are in flight; the replicas are awake.

        ``meta_info["served"]`` of the result says how each request was served (`Notes`). Of the prompts,
        ``meta_info["follow"]`` says what each is to draw (`Draws`).
        """
        if not self.is_colocated:
            self._loop = asyncio.get_running_loop()
        columns = prompts.non_tensor_batch
        names = [f"{uid}-{index}" for uid, index in zip(columns["uid"], columns["sample_index"], strict=True)]
        spans = prompts.meta_info.pop(FOLLOW, None)
        if spans is not None:
            self.service.spans.follow(names, spans)
        self.service.spans.note(names)
        try:
            batch = await self.agent_loops.generate(prompts)
        finally:
            served = self.service.spans.notes(names)
        batch.meta_info[SERVED] = served
        return batch

    async def _probed(self, version: int) -> DataProto:
        requests = probing.requests_of(self.config.rollout, len(self.tokenizer), version)
        answers = await self.service.ask_each(requests)
        # What a replica elsewhere counts is known as of the last query.
        await asyncio.gather(*(r.sampler.confirm(version) for r in self.service.replicas if r.name in answers))
        batch = probing.batch_of(requests, answers, self.tokenizer.pad_token_id or 0)
        num_bytes = self._weight_bytes()
        batch.meta_info["metrics"] = {"rollout/weights_mb": Metric(num_bytes / 1e6, "max")} if num_bytes else {}
        return batch

    async def _awake(self, work: Coroutine[Any, Any, DataProto]) -> DataProto:
        """The result of work for which the replicas are woken up."""
        await self.service.wake()
        try:
            return await work
        finally:
            if self._frees_cache():
                await self.service.sleep(level=1)

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """The result; where requests of other processes arrive, in the event loop in which they do."""
        if self._loop is None:
            return run_now(work)
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _frees_cache(self) -> bool:
        """Whether replicas free their caches for the trainers between rollouts."""
        setting = self.config.rollout.free_cache_engine
        if setting is None and not self.is_colocated:
            return False
        return frees_cache(setting, self.context.device, self._weight_bytes())

    def _weight_bytes(self) -> float:
        """Memory of the largest replica's weights; 0 where samplers do not count it."""
        return max((stats.get("weight_bytes", 0.0) for stats in self.service.replica_stats().values()), default=0.0)
