"""What the schedules with a queue share: sampling is ahead as far as the bound admits, training takes chunks in turn.

The clock is logical. Groups are admitted at the beginning of a step and whenever training waits for one that was lost;
which ones, and under which version, follows from counts. Where the samplers have processes of their own, groups are
sampled one by one beside training (`verl.trainer.ppo.beside`); else all that were admitted are sampled at once, in turn
with training. New weights are sent when a step is over, by default once every admitted group was sampled, so that both
ways draw each token with the same version; ``rollout.requests_at_update`` lets groups in flight go on instead.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from functools import partial
from typing import cast

import numpy as np

from verl.config import PPOTrainerConfig
from verl.metrics import notice
from verl.protocol import DataProto
from verl.single_controller.base import Roles
from verl.trainer.ppo import accounting, stages, staleness
from verl.trainer.ppo.beside import sampling_of
from verl.trainer.ppo.context import RunState, StepContext, together
from verl.trainer.ppo.filling import Filling
from verl.trainer.ppo.groups import Report, joined
from verl.trainer.ppo.queue import GroupQueue, QueueBound
from verl.trainer.ppo.schedules.sync import AHEAD, RESUMED, SyncSchedule
from verl.trainer.ppo.scripted import ScriptedSampling
from verl.trainer.ppo.stages import PromptSource
from verl.trainer.ppo.step import learn


class QueueSchedule(SyncSchedule):
    """Off-policy within a bound, which a subclass makes from the configuration."""

    prefix: str
    """Of the metrics that are the schedule's own."""

    @classmethod
    @abstractmethod
    def bound(cls, config: PPOTrainerConfig) -> QueueBound:
        """How far sampling may be ahead."""

    def __init__(self) -> None:
        super().__init__()
        self._filling: Filling | None = None

    def steps_of(self, config: PPOTrainerConfig, batches: int) -> int:
        """Steps in an epoch of the loader, whose batches may be of another size."""
        return max(1, batches * (config.data.gen_batch_size or config.data.train_batch_size)
                   // config.data.train_batch_size)  # fmt: skip

    def step(self, source: PromptSource, roles: Roles, ctx: StepContext) -> DataProto:
        """One training step, chunk after chunk."""
        self.settle(roles, ctx)
        filling, sampling = self._opened(roles, ctx)
        queue, bound, parts = filling.queue, filling.queue.bound, list[DataProto]()
        queue.publish(ctx.step - 1)
        sampling.open_step(queue, ctx)
        report = Report(queue, self.prefix, sampling.idle_seconds)
        for left in reversed(range(bound.groups // bound.chunk)):
            ctx.goes_on = left > 0
            # Nothing is saved between two chunks: once the first one changed the weights, the step goes on to its end.
            taken = filling.next_chunk(source, sampling, ctx, may_stop=not parts)
            report.trained(taken, ctx.step - 1)
            chunk = joined([entry.samples for entry in taken])
            accounting.batched(chunk, ctx)
            staleness.check(chunk, ctx, bound.enforced)
            train = partial(learn, chunk, roles, ctx, self.stages)
            parts.append(filling.beside(train, sampling, ctx))
        report.add_to(ctx, sampling.idle_seconds)
        ctx.sample_info = {name: [] for name in filling.details}
        if len(parts) == 1:
            return parts[0]
        batch = together(parts)
        stages.measure_chunks(batch, ctx)
        return batch

    def publish(self, roles: Roles, ctx: StepContext) -> None:
        """The sampler generates with the updated policy from here on."""
        filling, script = self._filling, ctx.run.script
        if filling is not None and (filling.sampling is not None or script is not None):
            sampling = self._opened(roles, ctx)[1]
            # After the last step only groups that were dropped meanwhile are in flight; the ledger hears of their end.
            waits, is_last = self._waits(sampling, ctx), ctx.step >= ctx.total_steps
            while (waits or is_last) and sampling.in_flight and (is_last or not ctx.stop.requested):
                filling.take_in(sampling, ctx, wait=True, may_stop=not is_last)
            idle = ctx.timers.seconds.get("wait_for_samples", 0.0)
            ctx.metrics.add(f"{self.prefix}/trainer/idle_seconds", idle, "last")  # with the wait before an update
            sampling.before_weights(ctx)
        super().publish(roles, ctx)

    def _waits(self, sampling: ScriptedSampling, ctx: StepContext) -> bool:
        """Whether an update waits for groups in flight; in a replay, for those that did end before it."""
        waits = ctx.config.actor_rollout_ref.rollout.requests_at_update == "wait"
        return waits or sampling.takes_turns or sampling.follows is not None

    def close(self) -> None:
        """End what is in flight."""
        if self._filling is not None and self._filling.sampling is not None:
            self._filling.sampling.close()

    def _opened(self, roles: Roles, ctx: StepContext) -> tuple[Filling, ScriptedSampling]:
        """At the first step of a run the queue is made, or what a checkpoint had in flight is sampled again."""
        filling = self._filling
        if filling is None:
            bound = self.bound(ctx.config)
            queue = GroupQueue(bound, ctx.step - 1, (ctx.step - 1) * bound.groups)
            filling = self._filling = Filling(queue, ctx.run)
        if filling.sampling is None:
            filling.start(ScriptedSampling(sampling_of(roles, ctx), ctx.run.record), ctx)
        return filling, cast(ScriptedSampling, filling.sampling)

    def held_samples(self) -> Iterable[DataProto]:
        """Of groups that are complete, and of those that are in flight."""
        return () if self._filling is None else self._filling.held_samples()

    def carried(self) -> dict[str, DataProto]:
        """Finished groups, and the prompts of the others and of those that were drawn and not admitted."""
        return {} if self._filling is None else self._filling.carried()

    def carry_on(self, parts: Mapping[str, DataProto], run: RunState) -> None:
        """Continue with what `carried` returned: unfinished groups are sampled from their prompts again."""
        bound = self.bound(run.config)
        waiting = len(run.pool) + len(parts.get(AHEAD, ()))
        if waiting:  # of a run under another schedule
            why = f"{waiting} samples that waited for the next step are dropped: no queue admitted them"
            notice(RESUMED, f"{why}; a step under trainer.v1.trainer_mode=sync would train on them")
            run.pool.keep_only(np.arange(0))
        self._filling = Filling(GroupQueue(bound, run.step, run.step * bound.groups), run)
        self._filling.carry_on(parts)
