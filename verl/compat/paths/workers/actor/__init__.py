"""Upstream's room of the actor's update; a worker updates its actor itself (`ActorRolloutRefWorker`)."""

from verl.compat.forms.actors import BasePPOActor, DataParallelPPOActor, MegatronPPOActor
