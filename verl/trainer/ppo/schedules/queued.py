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
from contextlib import nullcontext

import numpy as np

from verl.config import PPOTrainerConfig
from verl.metrics import notice
from verl.protocol import DataProto
from verl.single_controller.base import Roles
from verl.trainer.placement import topology_of
from verl.trainer.ppo import accounting, stages, staleness
from verl.trainer.ppo.beside import Beside, InTurn, Sampling
from verl.trainer.ppo.context import RunState, StepContext, together
from verl.trainer.ppo.groups import Drawn, Report, carried_groups, check_in_time, check_not_starved, groups_carried
from verl.trainer.ppo.queue import GroupQueue, QueueBound, QueuedGroup
from verl.trainer.ppo.schedules.sync import AHEAD, RESUMED, SyncSchedule
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
        self._queue: GroupQueue | None = None
        self._sampling: Sampling | None = None
        self._drawn, self._again = Drawn(), list[int]()
        self._run: RunState | None = None
        self._lost = 0
        self._details: dict[str, None] = {}
        """What the scorer returned besides the scores, for any group."""

    def steps_of(self, config: PPOTrainerConfig, batches: int) -> int:
        """Steps in an epoch of the loader, whose batches may be of another size."""
        return max(1, batches * (config.data.gen_batch_size or config.data.train_batch_size)
                   // config.data.train_batch_size)  # fmt: skip

    def step(self, source: PromptSource, roles: Roles, ctx: StepContext) -> DataProto:
        """One training step, chunk after chunk."""
        self.settle(roles, ctx)
        queue, sampling = self._opened(roles, ctx)
        queue.publish(ctx.step - 1)
        report, parts, bound = Report(queue, self.prefix, sampling.idle_seconds), list[DataProto](), queue.bound
        for left in reversed(range(bound.groups // bound.chunk)):
            ctx.goes_on = left > 0
            # Nothing is saved between two chunks: once the first one changed the weights, the step goes on to its end.
            taken = self._next_chunk(source, queue, sampling, ctx, may_stop=not parts)
            report.trained(taken, ctx.step - 1)
            chunk = together([entry.samples for entry in taken])
            accounting.batched(chunk, ctx)
            staleness.check(chunk, ctx, bound.enforced)
            parts.append(learn(chunk, roles, ctx, self.stages))
        report.add_to(ctx, sampling.idle_seconds)
        ctx.sample_info = {name: [] for name in self._details}
        return parts[0] if len(parts) == 1 else together(parts)

    def publish(self, roles: Roles, ctx: StepContext) -> None:
        """The sampler generates with the updated policy from here on."""
        # After the last step only groups that were dropped meanwhile are in flight, and the ledger hears of their end.
        waits, is_last = ctx.config.actor_rollout_ref.rollout.requests_at_update == "wait", ctx.step >= ctx.total_steps
        if self._queue is not None and self._sampling is not None and (waits or is_last):
            while self._sampling.in_flight and (is_last or not ctx.stop.requested):
                self._take_in(self._queue, self._sampling, ctx, wait=True, may_stop=not is_last)
        super().publish(roles, ctx)

    def close(self) -> None:
        """End what is in flight."""
        if self._sampling is not None:
            self._sampling.close()

    def _opened(self, roles: Roles, ctx: StepContext) -> tuple[GroupQueue, Sampling]:
        """At the first step of a run the queue is made, or what a checkpoint had in flight is sampled again."""
        if self._queue is None:
            bound = self.bound(ctx.config)
            self._queue = GroupQueue(bound, ctx.step - 1, (ctx.step - 1) * bound.groups)
        if self._sampling is None:
            self._run, self._sampling = ctx.run, self._started(roles, ctx)
            prompts = {entry.number: entry.prompt for entry in self._queue}
            self._sampling.begin({number: prompts[number] for number in self._again}, ctx)
            self._again = []
        return self._queue, self._sampling

    def _started(self, roles: Roles, ctx: StepContext) -> Sampling:
        if roles["rollout"].group.shares_processes(roles["actor"].group):
            return InTurn(roles)
        if ctx.needs_reward_baselines:
            why = "the greedy answers of its baseline are sampled with their batch, so sampling and training take turns"
            notice("algorithm.adv_estimator", why)
            return InTurn(roles)
        each = ctx.config.async_training.concurrent_samples_per_replica
        return Beside(roles, limit=each * len(topology_of(ctx.config).replicas))

    def _next_chunk(
        self, source: PromptSource, queue: GroupQueue, sampling: Sampling, ctx: StepContext, may_stop: bool
    ) -> list[QueuedGroup]:
        """The groups that the step trains on next; samples, or waits for them."""
        with ctx.stop.droppable() if may_stop else nullcontext():
            while not (may_stop and ctx.stop.requested):
                self._admit(source, queue, sampling, ctx)
                self._take_in(queue, sampling, ctx, wait=False)
                for late in queue.drop_overdue():
                    if late.is_complete:  # the others are dropped when they end
                        accounting.drop(late.samples, "stale", ctx)
                if queue.is_ready():
                    break
                check_not_starved(queue, self._lost, ctx)
                self._take_in(queue, sampling, ctx, wait=True, may_stop=may_stop)
        self._lost = queue.lost
        return queue.take()

    def _admit(self, source: PromptSource, queue: GroupQueue, sampling: Sampling, ctx: StepContext) -> None:
        """Begin as many groups as the bound admits and the rest of the run needs."""
        needed = ctx.total_steps * queue.bound.groups - queue.trained - len(queue)
        prompts = [self._drawn.next(source) for _ in range(min(queue.room(), needed))]
        sampling.begin({queue.admit(prompt): prompt for prompt in prompts}, ctx)

    def _take_in(
        self, queue: GroupQueue, sampling: Sampling, ctx: StepContext, wait: bool, may_stop: bool = True
    ) -> None:
        """Enter groups that ended since the last time."""
        ended = sampling.results(ctx, wait, may_stop)
        self._details |= dict.fromkeys(ctx.sample_info)
        for done in ended:
            if done.why:
                queue.lose(done.number, done.why)
                if done.why == "failed":
                    accounting.drop(done.samples, "failed_loop", ctx)
            elif not queue.complete(done.number, done.samples, done.oldest):
                accounting.drop(done.samples, "stale", ctx)

    def held_samples(self) -> Iterable[DataProto]:
        """Of groups that are complete, and of those that are in flight."""
        for entry in self._queue or ():
            if entry.is_complete:
                yield entry.samples
            elif entry.number not in self._again and self._run is not None:
                yield stages.rows_of(entry.prompt, self._run.samples_per_prompt)

    def carried(self) -> dict[str, DataProto]:
        """Finished groups, and the prompts of the others and of those that were drawn and not admitted."""
        if self._queue is None or self._run is None:
            return {}
        return carried_groups(self._queue, self._drawn, list(self._details))

    def carry_on(self, parts: Mapping[str, DataProto], run: RunState) -> None:
        """Continue with what `carried` returned: unfinished groups are sampled from their prompts again."""
        bound = self.bound(run.config)
        waiting = len(run.pool) + len(parts.get(AHEAD, ()))
        if waiting:  # of a run under another schedule
            why = f"{waiting} samples that waited for the next step are dropped: no queue admitted them"
            notice(RESUMED, f"{why}; a step under trainer.v1.trainer_mode=sync would train on them")
            run.pool.keep_only(np.arange(0))
        self._queue, self._run = GroupQueue(bound, run.step, run.step * bound.groups), run
        self._again, details = groups_carried(parts, self._queue, self._drawn)
        self._queue.trained = run.step * bound.groups  # the steps of the run before may have had another size
        check_in_time(self._queue)
        self._lost, self._details = self._queue.lost, dict.fromkeys(details)
