"""Upstream's module of the actor section; its settings live in `verl.config`."""

from verl.config import ActorConfig, PolicyLossConfig

__all__ = ["ActorConfig", "PolicyLossConfig"]
