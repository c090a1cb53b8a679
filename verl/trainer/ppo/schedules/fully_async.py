"""Sampling and training as a stream: a share of every step's samples may be from before its weights.

``async_training.staleness_threshold`` is that share, f in `verl.trainer.ppo.queue`: between two weight updates at most
(1 + f) k B groups are sampled, those that wait from before included. B is ``async_training.require_batches`` times a
mini-batch, which is trained on as soon as it is complete; k, ``async_training.trigger_parameter_sync_step``, of these
make a step, after which weights are sent. So a token is at most ceil(f) versions old, and with f <= 1 at most a share f
of a step's samples is older than its weights.
"""

from __future__ import annotations

from fractions import Fraction

from verl.config import PPOTrainerConfig
from verl.trainer.ppo.queue import QueueBound
from verl.trainer.ppo.schedules.queued import QueueSchedule


class FullyAsyncSchedule(QueueSchedule):
    """Takes ``require_batches`` mini-batches at a time."""

    prefix = "fully_async"

    @classmethod
    def bound(cls, config: PPOTrainerConfig) -> QueueBound:
        settings, rules = config.async_training, config.trainer.v1.sampler
        chunk = settings.require_batches * config.actor_rollout_ref.actor.ppo_mini_batch_size
        ahead = Fraction(str(settings.staleness_threshold))
        in_order, overdue = rules.order == "admission", rules.max_off_policy_strategy
        return QueueBound(config.data.train_batch_size, chunk, ahead, in_order=in_order, overdue=overdue)

    def length_of(self, config: PPOTrainerConfig, steps_per_epoch: int) -> int:
        """Ends after ``async_training.total_rollout_steps`` prompts, if not earlier."""
        usual, prompts = super().length_of(config, steps_per_epoch), config.async_training.total_rollout_steps
        return usual if prompts is None else min(usual, max(1, prompts // config.data.train_batch_size))
