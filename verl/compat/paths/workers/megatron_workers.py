"""Upstream's workers over Megatron; here one class serves every engine (``actor.strategy``)."""

from verl.workers import ActorRolloutRefWorker, CriticWorker, RewardModelWorker

AsyncActorRolloutRefWorker = ActorRolloutRefWorker
