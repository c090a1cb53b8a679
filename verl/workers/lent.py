"""The role that a trainer's process plays while its trainer waits: it samples."""

from __future__ import annotations

from verl.config import ActorRolloutRefConfig, replace
from verl.rollout.from_sync import run_now
from verl.single_controller.base import Dispatch, register
from verl.workers.part import WorkerContext
from verl.workers.replica import ReplicaWorker, frees_cache

LENT = "lent"
"""The role."""


class LentWorker(ReplicaWorker):
    """A `ReplicaWorker` in the process of a rank of the actor, from which it gets its weights each time it is lent.

    Between two times it sleeps, so that its caches take no memory of the trainer's.

    Args:
        config: the section ``actor_rollout_ref`` of the configuration; whatever brings weights to the samplers' pool,
            these stay in the process.
        context: device and the peers' time-out.
    """

    def __init__(self, config: ActorRolloutRefConfig, context: WorkerContext | None = None):
        rollout = config.rollout
        engine = replace(rollout.checkpoint_engine, backend="naive", engine_kwargs={})
        super().__init__(replace(config, rollout=replace(rollout, checkpoint_engine=engine)), context)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Start the replica, and put it to sleep."""
        super().init_model()
        run_now(self.rest())

    @staticmethod
    def replica_name(rank: int) -> str:
        return f"replica of actor[{rank}]"

    async def rest(self) -> None:
        """Free the caches for the trainer, where they are on its device."""
        if not self.replicas:
            return
        weight_bytes = (await self.host.status())["stats"].get("weight_bytes", 0.0)
        if frees_cache(self.config.rollout.free_cache_engine, self.context.device, weight_bytes):
            await self.host.sleep(level=1)
