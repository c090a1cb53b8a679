"""Upstream's actor over a module and an optimizer that the caller has built."""

from __future__ import annotations

import torch
from torch import nn

from verl.config import ActorConfig
from verl.engines.given import GivenModuleEngine
from verl.workers.actor.base import BasePPOActor

__all__ = ["DataParallelPPOActor"]


class DataParallelPPOActor(BasePPOActor):
    """The actor of one process; over several, the workers shard the model (``actor.strategy=fsdp2``).

    Args:
        config: the section ``actor_rollout_ref.actor``.
        actor_module: a causal language model of transformers.
        actor_optimizer: over its parameters; without one there are only log-probs.
    """

    def __init__(
        self, config: ActorConfig, actor_module: nn.Module, actor_optimizer: torch.optim.Optimizer | None = None
    ):
        super().__init__(config, GivenModuleEngine(actor_module, actor_optimizer, config.fsdp_config, config.grad_clip))
        self.actor_module, self.actor_optimizer = actor_module, actor_optimizer
