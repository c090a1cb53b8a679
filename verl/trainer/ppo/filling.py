"""A queue being filled and emptied: prompts are admitted as far as its bound allows, sampled, entered, and taken.

This is the half of the schedules with a queue that comes before training, and what a checkpoint keeps of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, suppress

from verl.protocol import DataProto
from verl.single_controller.base.interrupts import Interrupted, interruptible
from verl.trainer.ppo import accounting, stages
from verl.trainer.ppo.context import RunState, StepContext
from verl.trainer.ppo.groups import OF_FAILED, Drawn, carried_groups, check_in_time, check_not_starved, groups_carried
from verl.trainer.ppo.queue import GroupQueue, QueuedGroup
from verl.trainer.ppo.scripted import ScriptedSampling
from verl.trainer.ppo.stages import PromptSource


class Filling:
    """The groups of a run between its prompts and training.

    Args:
        queue: admission follows its bound.
        run: its state; groups that a checkpoint had unfinished are sampled from their prompts again.

    Attributes:
        details: columns that the scorer returned besides the scores, for any group.
        lost: groups that had come to nothing when the last chunk was taken.
    """

    def __init__(self, queue: GroupQueue, run: RunState):
        self.queue, self.run = queue, run
        self.sampling: ScriptedSampling | None = None
        self.details: dict[str, None] = {}
        self.lost = 0
        self._drawn, self._again, self._retried = Drawn(), list[int](), set[int]()

    def start(self, sampling: ScriptedSampling, ctx: StepContext) -> ScriptedSampling:
        """Groups are sampled there from here on; first those that a checkpoint had in flight."""
        self.sampling = sampling
        prompts = {entry.number: entry.prompt for entry in self.queue}
        sampling.begin_again({number: prompts[number] for number in self._again}, self.queue, ctx)
        self._again = []
        return sampling

    def next_chunk(
        self, source: PromptSource, sampling: ScriptedSampling, ctx: StepContext, may_stop: bool
    ) -> list[QueuedGroup]:
        """The groups that the step trains on next; samples, or waits for them.

        Args:
            may_stop: nothing was trained on in this step.
        """
        queue = self.queue
        with ctx.stop.droppable() if may_stop else nullcontext():
            while not (may_stop and ctx.stop.requested):
                self._admit(source, sampling, ctx)
                self.take_in(sampling, ctx, wait=False)
                overdue = queue.drop_overdue()
                sampling.dropped(overdue, ctx)
                for late in overdue:
                    if late.is_complete:  # the others are dropped when they end
                        accounting.drop(late.samples.alone(), "stale", ctx)
                if queue.is_ready():
                    break
                check_not_starved(queue, self.lost, ctx)
                self.take_in(sampling, ctx, wait=True, may_stop=may_stop)
        self.lost, taken = queue.lost, queue.take()
        sampling.took(taken, ctx)
        return taken

    def _admit(self, source: PromptSource, sampling: ScriptedSampling, ctx: StepContext) -> None:
        """Begin as many groups as the bound admits and the rest of the run needs."""
        queue = self.queue
        needed = ctx.total_steps * queue.bound.groups - queue.trained - len(queue)
        prompts = [self._drawn.next(source) for _ in range(sampling.admits(min(queue.room(), needed), ctx))]
        sampling.begin({queue.admit(prompt): prompt for prompt in prompts}, ctx)

    def take_in(self, sampling: ScriptedSampling, ctx: StepContext, wait: bool, may_stop: bool = True) -> None:
        """Enter groups that ended since the last time."""
        ended = sampling.results(ctx, wait, may_stop)
        self.details |= dict.fromkeys(ctx.sample_info)
        again = {}
        for done in ended:
            if done.why in OF_FAILED:
                accounting.drop(done.rows.alone(), OF_FAILED[done.why], ctx)
                prompt = self._once_more(done.number) if done.why == "failed" else None
                if prompt is not None:
                    again[done.number] = prompt
                    continue
            if done.why:
                self.queue.lose(done.number, "failed" if done.why in OF_FAILED else done.why)
            elif not self.queue.complete(done.number, done.rows, done.oldest):
                accounting.drop(done.rows.alone(), "stale", ctx)
        sampling.begin(again, ctx)

    def _once_more(self, number: int) -> DataProto | None:
        """The prompt of a group that failed for the first time, as what ran it may have been killed."""
        entry = next((entry for entry in self.queue if entry.number == number), None)
        if entry is None or number in self._retried:
            return None
        self._retried.add(number)
        self.queue.begin_again(number)
        prompt: DataProto = entry.prompt
        return prompt

    def beside(self, train: Callable[[], DataProto], sampling: ScriptedSampling, ctx: StepContext) -> DataProto:
        """The trained batch. An error that ends the sampling meanwhile is raised while the update is still in work."""
        with suppress(Interrupted), interruptible(sampling.failed):
            return train()
        self.take_in(sampling, ctx, wait=False)
        raise AssertionError("the sampling has failed, and its error was to be raised")

    def held_samples(self) -> Iterable[DataProto]:
        """Of groups that are complete, and of those that are in flight."""
        for entry in self.queue:
            if entry.is_complete:
                yield entry.samples.alone()
            elif entry.number not in self._again:
                yield stages.rows_of(entry.prompt, self.run.samples_per_prompt)

    def carried(self) -> dict[str, DataProto]:
        """Finished groups, and the prompts of the others and of those that were drawn and not admitted."""
        return carried_groups(self.queue, self._drawn, list(self.details))

    def carry_on(self, parts: Mapping[str, DataProto]) -> None:
        """Continue with what `carried` returned."""
        queue = self.queue
        self._again, details = groups_carried(parts, queue, self._drawn)
        queue.trained = self.run.step * queue.bound.groups  # the steps of the run before may have had another size
        check_in_time(queue)
        self.lost, self.details = queue.lost, dict.fromkeys(details)
