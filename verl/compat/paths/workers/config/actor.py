"""Upstream's module of the actor section; one class serves every backend."""

from verl.config import ActorConfig, PolicyLossConfig

FSDPActorConfig = McoreActorConfig = ActorConfig
