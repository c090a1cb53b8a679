"""Log-probs and updates of one policy under upstream's method names, for code that calls them without a worker."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from verl.algorithms.losses import PPOPolicyLoss
from verl.compat.forms.given_module import GivenModuleEngine
from verl.config import ActorConfig
from verl.engines.base import Engine
from verl.metrics import MetricSet
from verl.protocol import DataProto
from verl.workers.part import ModelPart, PassLimits


class BasePPOActor:
    """What `ActorRolloutRefWorker` does with its actor, for code that calls it without a worker.

    Args:
        config: the section ``actor_rollout_ref.actor``; ``ppo_mini_batch_size`` counts rows here.
        engine: the policy.
    """

    def __init__(self, config: ActorConfig, engine: Engine):
        c = self.config = config
        limits = PassLimits.of(
            c.ppo_micro_batch_size_per_gpu, c.ppo_micro_batch_size, c.use_dynamic_bsz, c.ppo_max_token_len_per_gpu, 1
        )
        self.part = ModelPart(
            engine, train_limits=limits, loss_fn=PPOPolicyLoss(config), mini_batch_rows=config.ppo_mini_batch_size
        )

    def compute_log_prob(self, data: DataProto, calculate_entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        """Log-probs of the responses and, on request, entropies, (B, T); logits are divided by ``temperature`` first.

        ``temperature`` is read from ``data.meta_info``, 1.0 if it is not there; also by `update_policy`.
        """
        self.part.temperature = data.meta_info.get("temperature", 1.0)
        outputs = self.part.infer(data, ("log_probs", "entropy") if calculate_entropy else ("log_probs",))
        return outputs["log_probs"], outputs.get("entropy")

    def update_policy(self, data: DataProto) -> dict[str, float]:
        """``ppo_epochs`` times one optimizer step per mini-batch; metrics under ``actor/``.

        ``data`` holds ``advantages``, ``old_log_probs`` and, if the sampler is corrected for, ``rollout_is_weights``.
        """
        self.part.temperature = data.meta_info.get("temperature", 1.0)
        metrics = MetricSet()
        for _ in range(self.config.ppo_epochs):
            metrics.merge(self.part.train(data))
        return {f"actor/{name}": value for name, value in metrics.values().items()}


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


class MegatronPPOActor(BasePPOActor):
    """The actor over a `verl.engines.megatron.engine.MegatronEngine`, passed as ``engine``."""
