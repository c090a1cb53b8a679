"""Batches queued ahead on the trainers' own devices: step s trains on groups that are up to W versions old.

W is ``trainer.v1.colocate_async.num_warmup_batches``, in training batches; a part of one counts by its share.
"""

from __future__ import annotations

from fractions import Fraction

from verl.config import PPOTrainerConfig
from verl.trainer.ppo.queue import QueueBound
from verl.trainer.ppo.schedules.queued import QueueSchedule


class ColocateAsyncSchedule(QueueSchedule):
    """Takes each training batch from a queue of warm-up batches."""

    prefix = "colocate_async"

    @classmethod
    def bound(cls, config: PPOTrainerConfig) -> QueueBound:
        groups, mode = config.data.train_batch_size, config.trainer.v1
        return of_sampler(config, groups, groups, mode.colocate_async.num_warmup_batches)


def of_sampler(config: PPOTrainerConfig, groups: int, chunk: int, warmup: float) -> QueueBound:
    """The bound of a queue with ``warmup`` batches ahead, by ``trainer.v1.sampler``."""
    rules = config.trainer.v1.sampler
    threshold = rules.max_off_policy_threshold
    return QueueBound(
        groups,
        chunk,
        Fraction(str(warmup)),
        staleness=threshold,
        in_order=rules.order == "admission",
        overdue="reweight" if threshold is None else rules.max_off_policy_strategy,
    )
