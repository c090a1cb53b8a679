"""Batches queued ahead, by samplers in a pool of their own: sampling goes on while the trainers train.

A step trains on ``data.train_batch_size`` prompts, ``trainer.v1.separate_async.parameter_sync_step`` mini-batches, and
then sends its weights. Where the sampler's log-probs are the old ones, each mini-batch is trained on as soon as it is
complete; else the step takes its batch as a whole, because all its mini-batches share the log-probs of one old policy.
"""

from __future__ import annotations

from verl.config import PPOTrainerConfig
from verl.config.root import sampler_is_old_policy
from verl.trainer.ppo.queue import QueueBound
from verl.trainer.ppo.schedules.colocate_async import of_sampler
from verl.trainer.ppo.schedules.queued import QueueSchedule


class SeparateAsyncSchedule(QueueSchedule):
    """Takes mini-batches or whole batches from a queue of warm-up batches."""

    prefix = "separate_async"

    @classmethod
    def bound(cls, config: PPOTrainerConfig) -> QueueBound:
        groups, streams = config.data.train_batch_size, sampler_is_old_policy(config)
        chunk = config.actor_rollout_ref.actor.ppo_mini_batch_size if streams else groups
        return of_sampler(config, groups, chunk, config.trainer.v1.separate_async.num_warmup_batches)
