"""Upstream's actor over Megatron-Core, whose modules, schedule and optimizer are one engine here."""

from verl.workers.actor.base import BasePPOActor

__all__ = ["MegatronPPOActor"]


class MegatronPPOActor(BasePPOActor):
    """The actor over a `verl.engines.megatron.engine.MegatronEngine`, passed as ``engine``."""
