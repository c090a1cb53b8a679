"""The stream of groups between the prompts of a run and training: admitted, sampled, scored, filtered, taken.

Whatever the schedule, a group has one way. Its prompt is drawn from the loader and admitted, as far as the
`GroupAdmission` allows; a driver samples and scores it, now or while the trainers train; a group without signal is
dropped, and makes room for another; a complete one waits until a step takes it. Whatever waits is here, and is what a
checkpoint keeps of sampling.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from itertools import compress
from typing import cast

from verl.agent_loop.unfinished import EARLIER
from verl.data.loader import PromptSource
from verl.errors import DataError
from verl.metrics import notice
from verl.protocol import DataProto
from verl.single_controller.base.interrupts import Interrupted, interruptible
from verl.trainer.ppo import accounting, group_filter, stages, staleness
from verl.trainer.ppo.admission import GroupAdmission, GroupQueue, QueuedGroup
from verl.trainer.ppo.context import RunState, StepContext
from verl.trainer.ppo.driver import Driver, driver_of
from verl.trainer.ppo.groups import (
    GEN_BATCHES,
    LIMIT,
    OF_FAILED,
    UNFINISHED,
    DrawnPrompts,
    GroupRows,
    Report,
    check_not_starved,
    gen_batches,
    joined,
    trimmed,
)
from verl.trainer.ppo.stream_parts import BY_BATCH, FLAT, check_in_time, load_parts, of_earlier_release, parts_of
from verl.trainer.ppo.trajectories import as_rows
from verl.workers.roles import Roles

MANY_GEN_BATCHES = 10
"""This many batches of prompts for one step are worth a notice."""
RESUMED = "trainer.v1.trainer_mode, resumed run"
"""Key of what is said of a run that continues under another schedule."""


class GroupStream:
    """The groups of a run, from prompt to training batch.

    Args:
        admission: how far sampling may be ahead.
        run: its state.
        version: of the weights that sampling begins with.
        prefix: of the metrics of a queue; empty: the stream reports none.
    """

    def __init__(self, admission: GroupAdmission, run: RunState, version: int, prefix: str = ""):
        self.admission, self.run, self.prefix = admission, run, prefix
        self.queue = GroupQueue(admission, version, version * admission.groups)
        self._driver: Driver | None = None
        self._drawn = DrawnPrompts()
        self._ahead: StepContext | None = None
        """The context of the next step, whose batch was sampled ahead."""
        self._lost = self.queue.lost
        """Groups that had come to nothing when the last batch was taken."""
        self._again, self._retried = set[int](), set[int]()
        self._flat: list[int] = []
        """``__row__`` of the prompts of filtered groups since the last batch was taken."""

    @property
    def driver(self) -> Driver:
        """Samples the groups."""
        return cast(Driver, self._driver)

    @property
    def is_open(self) -> bool:
        """There is a driver."""
        return self._driver is not None

    def open(self, roles: Roles, ctx: StepContext, driver: Driver | None = None) -> None:
        """Groups are sampled by these workers, or by ``driver``; first those that a checkpoint had in flight."""
        if self.is_open:
            return
        by_batch = self.admission.by_batch
        self._driver = driver or driver_of(roles, ctx, by_batch)
        if not by_batch:
            again = {entry.number: entry.prompt for entry in self.queue if entry.number in self._again}
            self.driver.begin_again(again, self.queue, ctx)
            self._again.clear()

    # ---- a training step ---------------------------------------------------------------------------------------

    def open_step(self, ctx: StepContext) -> None:
        """Sampling has the weights that the step begins with."""
        self.queue.publish(ctx.step - 1)
        self.driver.open_step(self.queue, ctx)
        self._report = Report(self.queue, self.prefix, self.driver.idle_seconds)

    def take(self, source: PromptSource, ctx: StepContext, may_stop: bool) -> DataProto:
        """The next batch to train on; samples it, or waits for it.

        Args:
            may_stop: nothing was trained on in this step.
        """
        if self._ahead is not None:
            ctx.take_in(self._ahead)
            self._ahead = None
        self._fill(source, ctx, may_stop)
        self._lost, taken = self.queue.lost, self.queue.take()
        ctx.flat_rows, self._flat = [*ctx.flat_rows, *self._flat], []
        self.driver.took(taken, ctx)
        batch = joined([entry.samples for entry in taken])
        if self.admission.trained_on is not None:
            batch, taken = self._preferred(batch, taken, self.admission.trained_on, ctx)
        self._report.trained(taken, ctx.step - 1)
        batch = batch if self.admission.by_batch else trimmed(batch)
        accounting.batched(batch, ctx)
        if self.admission.by_batch:
            ctx.metrics.add(GEN_BATCHES, 0, "sum")
            if ctx.config.algorithm.filter_groups.enable:
                waiting = self.queue.complete_groups * ctx.run.samples_per_prompt
                ctx.metrics.add("training/filter_groups/carried_samples", waiting, "last")
        return as_rows(batch, ctx)

    def _preferred(
        self, batch: DataProto, taken: list[QueuedGroup], kept: int, ctx: StepContext
    ) -> tuple[DataProto, list[QueuedGroup]]:
        """The groups that are trained on, of those that were taken (``data.oversample_factor``)."""
        rows = group_filter.chosen_rows(batch, kept, ctx)
        accounting.drop_rows(batch, ~rows, "surplus", ctx)
        self.queue.pass_over(len(taken) - kept)
        return batch.select_idxs(rows), list(compress(taken, rows[:: self.run.samples_per_prompt]))

    def close_step(self, ctx: StepContext) -> None:
        """The step has its batches."""
        if self.prefix:
            self._report.add_to(ctx, self.driver.idle_seconds)

    def prefetch(self, source: PromptSource, ahead: StepContext, may_stop: bool) -> None:
        """Sample the next step's batch, with its context."""
        self._fill(source, ahead, may_stop)
        self._ahead = ahead
        complete = [entry for entry in self.queue if entry.is_complete]
        batch = joined([entry.samples for entry in complete])  # once: for the checkpoint and for the step
        for entry, rows in zip(complete, GroupRows.each(batch, ahead.run.samples_per_prompt), strict=True):
            entry.samples = rows

    def during(self, train: Callable[[], DataProto], ctx: StepContext) -> DataProto:
        """The trained batch. An error that ends the sampling meanwhile is raised while the update is still in work."""
        with suppress(Interrupted), interruptible(self.driver.failed):
            return train()
        self.take_in(ctx, wait=False)
        raise AssertionError("the sampling has failed, and its error was to be raised")

    def before_update(self, ctx: StepContext) -> None:
        """Return once new weights may be sent: by default when every admitted group was sampled.

        After the last step only groups that were dropped meanwhile are in flight; the ledger hears of their end.
        """
        driver, is_last = self.driver, ctx.step >= ctx.run.total_steps
        waits = ctx.config.actor_rollout_ref.rollout.requests_at_update == "wait"
        waits = waits or driver.takes_turns or driver.follows is not None or is_last
        while waits and driver.in_flight and (is_last or not ctx.run.stop.requested):
            self.take_in(ctx, wait=True, may_stop=not is_last)
        if self.prefix:
            idle = ctx.timers.seconds.get("wait_for_samples", 0.0)
            ctx.metrics.add(f"{self.prefix}/trainer/idle_seconds", idle, "last")
        driver.before_weights(ctx)

    def close(self) -> None:
        """End what is in flight."""
        if self._driver is not None:
            self._driver.close()

    # ---- admission and results ---------------------------------------------------------------------------------

    def _fill(self, source: PromptSource, ctx: StepContext, may_stop: bool) -> None:
        """Admit and sample groups until there is a batch."""
        by_batch = self.admission.by_batch
        with ctx.run.stop.droppable() if may_stop else nullcontext():
            if by_batch:
                self._drop_overdue(ctx)
            while not (may_stop and ctx.run.stop.requested):
                if by_batch:
                    self._admit_batch(source, ctx)
                else:
                    self._admit(source, ctx)
                self.take_in(ctx, wait=False)
                self._drop_overdue(ctx)
                if self.queue.is_ready():
                    return
                if not by_batch:
                    check_not_starved(self.queue, self._lost, ctx)
                    self.take_in(ctx, wait=True, may_stop=may_stop)

    def _admit(self, source: PromptSource, ctx: StepContext) -> None:
        """Begin as many groups as the bound admits and the rest of the run needs."""
        queue = self.queue
        needed = ctx.run.total_steps * queue.bound.groups - queue.trained - len(queue)
        prompts = self._drawn.take(source, self.driver.admits(min(queue.room(), needed), ctx))
        self.driver.begin({queue.admit(prompt): prompt for prompt in prompts}, ctx)

    def _admit_batch(self, source: PromptSource, ctx: StepContext) -> None:
        """Begin a batch of prompts, or several as one, after the groups in work, if the step lacks any."""
        queue, in_work = self.queue, self.admission.in_work
        if queue.is_ready():
            return
        again = {entry.number: entry.prompt for entry in queue if not entry.is_complete}
        for number in again.keys() & self._again:
            queue.begin_again(number)
        self._again.clear()
        if in_work is None and again:  # of another schedule: perhaps they are enough
            return self.driver.begin(again, ctx)
        batches = 1 + self._may_sample_more(ctx)
        self._count_gen_batches(batches, ctx)
        if in_work is None:
            new, enough = [prompt for _ in range(batches) for prompt in self._drawn.batch(source)], None
        else:
            new = self._drawn.take(source, max(1, batches * in_work - len(again)))
            enough = queue.bound.chunk - queue.complete_groups
        self.driver.begin(again | {queue.admit(prompt): prompt for prompt in new}, ctx, enough)

    def _may_sample_more(self, ctx: StepContext) -> int:
        """Batches of prompts that are sampled together with the next one: none beyond the limit of a step."""
        rule = ctx.config.algorithm.filter_groups
        if not rule.enable:
            return 0
        limit = rule.max_num_gen_batches
        left = limit - gen_batches(ctx) if limit > 0 else rule.max_inflight_gen_batches
        return max(0, min(rule.max_inflight_gen_batches, left) - 1)

    def _count_gen_batches(self, number: int, ctx: StepContext) -> None:
        """More batches of prompts are sampled for this step; an endless refill is an error."""
        before, each = gen_batches(ctx), ctx.run.samples_per_prompt
        now = before + number
        ctx.metrics.add(GEN_BATCHES, number, "sum")
        limit, kept = ctx.config.algorithm.filter_groups.max_num_gen_batches, self.queue.complete_groups * each
        if 0 < limit < now:
            raise DataError(
                f"{limit} batches of prompts were sampled, only {kept} of {self.admission.groups * each} samples kept",
                key=LIMIT,
                fix="The task is too easy or too hard for this model: change the data, raise the limit or set it to 0.",
            )
        if limit <= 0 and before < MANY_GEN_BATCHES <= now:
            notice(
                LIMIT,
                f"step {ctx.step} samples batch {now} of prompts, with {kept} of "
                f"{self.admission.groups * each} samples kept; without a limit this continues until the batch is full",
            )

    def _drop_overdue(self, ctx: StepContext) -> None:
        """Groups that are too stale are dropped; those in flight when they end."""
        late = self.queue.drop_overdue()
        self.driver.dropped(late, ctx)
        complete = [entry.samples for entry in late if entry.is_complete]
        if not complete:
            return
        samples = joined(complete)
        accounting.drop(samples, "stale", ctx)
        if self.admission.by_batch:
            staleness.measure_dropped(samples, ctx)

    def take_in(self, ctx: StepContext, wait: bool, may_stop: bool = True) -> None:
        """Enter groups that ended since the last time."""
        ended = self.driver.results(ctx, wait, may_stop)
        again = {}
        for done in ended:
            if done.why == UNFINISHED:
                self.queue.get(done.number).prompt = done.rows
                continue
            if done.why in OF_FAILED:
                accounting.drop(done.rows.alone(), OF_FAILED[done.why], ctx)
                prompt = self._once_more(done.number) if done.why == "failed" else None
                if prompt is not None:
                    again[done.number] = prompt
                    continue
            if done.why == "filtered" and done.compared and done.number in self.queue:
                prompt = self.queue.get(done.number).prompt
                self._flat += map(int, prompt.alone().non_tensor_batch.get(accounting.ROW, ()))
            if done.why:
                self.queue.lose(done.number, "failed" if done.why in OF_FAILED else done.why)
            elif not self.queue.complete(done.number, done.rows, done.oldest):
                accounting.drop(done.rows.alone(), "stale", ctx)
        self.driver.begin(again, ctx)

    def _once_more(self, number: int) -> GroupRows | None:
        """The prompt of a group that failed for the first time, as what ran it may have been killed."""
        if number not in self.queue or number in self._retried:
            return None
        self._retried.add(number)
        self.queue.begin_again(number)
        return cast(GroupRows, self.queue.get(number).prompt)

    # ---- between two steps -------------------------------------------------------------------------------------

    def held_samples(self) -> Iterable[DataProto]:
        """Of groups that are complete, and of those that are in flight or in work."""
        for entry in self.queue:
            if entry.is_complete:
                yield entry.samples.alone()
            elif entry.number not in self._again:
                yield stages.rows_of(entry.prompt.alone(), self.run.samples_per_prompt)

    def state(self) -> dict[str, DataProto]:
        """Parts of a checkpoint; later steps leave them as they are."""
        context = None if self._ahead is None else self._ahead.state_dict()
        flat = {FLAT: DataProto.from_dict(non_tensors={accounting.ROW: list(self._flat)})} if self._flat else {}
        return {**parts_of(self.queue, self._drawn, context=context), **flat}

    def load_state(self, parts: Mapping[str, DataProto]) -> None:
        """Continue with what `state` returned, perhaps under another schedule: groups in flight are sampled again."""
        queue, by_batch, run = self.queue, self.admission.by_batch, self.run
        if FLAT in parts:
            self._flat = parts[FLAT].non_tensor_batch[accounting.ROW].tolist()
        queue.version = run.step
        state = load_parts(of_earlier_release(parts, run.step), queue, self._drawn)
        queue.trained = run.step * queue.bound.groups  # the steps of the run before may have had another size
        if not state:
            return
        self._drop_of_another_size()
        was_by_batch, context = state.get(BY_BATCH, False), state.get("context")
        if was_by_batch and not by_batch:
            self._drop_of_batches()
        elif by_batch and not was_by_batch and queue.complete_groups:
            rows = sum(len(entry.samples) for entry in queue if entry.is_complete)
            notice(RESUMED, f"the first {rows} samples are those that waited in its queue")
        elif by_batch and context is not None and not self.admission.ahead:
            notice(RESUMED, "the first batch is the one that the run had sampled ahead")
        choice = self.admission.trained_on
        if by_batch and context is not None and choice is not None and queue.complete_groups < self.admission.chunk:
            why = f"{queue.complete_groups} groups waited, chosen by an earlier release; the next step samples more"
            notice("data.oversample_factor, resumed run", why)
        self._again = {entry.number for entry in queue if not entry.is_complete and not self._stays_in_work(entry)}
        if self.admission.in_work is None:
            for prompt in (*(entry.prompt for entry in queue if not entry.is_complete), *self._drawn.left):
                prompt.batch.non_tensor_batch.pop(EARLIER, None)
        check_in_time(queue)
        self._lost = queue.lost
        if context is not None and by_batch:
            self._ahead = run.open(run.step + 1)
            self._ahead.load_state_dict(context)
            if "gen_batches" in context:  # of an earlier release
                self._ahead.metrics.add(GEN_BATCHES, context["gen_batches"], "sum")

    def _drop_of_batches(self) -> None:
        """What a schedule without bound left is not trained on under one that has a bound."""
        complete = [entry for entry in self.queue if entry.is_complete]
        if complete:
            number = sum(len(entry.samples) for entry in complete)
            why = f"{number} samples that waited for the next step are dropped: no queue admitted them"
            notice(RESUMED, f"{why}; a step under trainer.v1.trainer_mode=sync would train on them")
        for entry in complete:
            self.queue.lose(entry.number, "surplus")
        admitted = self.queue.counts["admitted"]  # the other counts are of a run without a queue
        self.queue.counts = Counter(admitted=admitted, surplus=admitted - len(self.queue))

    def _drop_of_another_size(self) -> None:
        """Groups of the run before, where that had another ``rollout.n``."""
        each = self.run.samples_per_prompt
        wrong = [entry for entry in self.queue if entry.is_complete and len(entry.samples) != each]
        for entry in wrong:
            self.queue.lose(entry.number, "surplus")
        if wrong:
            why = f"{len(wrong)} groups that waited for the next step have another number of samples, and are dropped"
            notice("actor_rollout_ref.rollout.n, resumed run", why)

    def _stays_in_work(self, entry: QueuedGroup) -> bool:
        """Whether the samples of a group continue with what they have (``rollout.keep_unfinished``)."""
        prompt = entry.prompt.alone().select()
        states = prompt.non_tensor_batch.get(EARLIER, [None])[0]
        if states is None:
            return False
        if self.admission.in_work is not None and len(states) == self.run.samples_per_prompt:
            return True
        del prompt.non_tensor_batch[EARLIER]
        entry.prompt = GroupRows.of(prompt)
        why = "responses that the run before had begun are sampled from their prompts again"
        notice("actor_rollout_ref.rollout.keep_unfinished, resumed run", why)
        return False
