"""Upstream's room of the actor's update; a worker updates its actor itself (`ActorRolloutRefWorker`)."""

from verl.workers.by_hand import BasePPOActor, DataParallelPPOActor, MegatronPPOActor
