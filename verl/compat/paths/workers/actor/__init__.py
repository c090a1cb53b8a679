"""Upstream's room of the actor's update; here a worker updates its actor itself (`ActorRolloutRefWorker`)."""

from verl.workers.actor.base import BasePPOActor
from verl.workers.actor.dp_actor import DataParallelPPOActor
from verl.workers.actor.megatron_actor import MegatronPPOActor

__all__ = ["BasePPOActor", "DataParallelPPOActor", "MegatronPPOActor"]
