"""One step off: while a batch is learned from, the next one is sampled with the weights from before that update.

Step k trains version k - 1 on tokens of version k - 2, so that every token is exactly one version old; those of the
first step are new. Where the samplers have processes of their own the two halves run at once, else they take turns, the
sampling first: the same numbers. Weights are published when both are done, so none arrive while tokens are drawn.
"""

from __future__ import annotations

from collections.abc import Mapping

from verl.protocol import DataProto
from verl.single_controller.base import Roles
from verl.trainer.ppo import staleness
from verl.trainer.ppo.ahead import side_by_side
from verl.trainer.ppo.context import RunState, StepContext
from verl.trainer.ppo.schedules.sync import AHEAD, SyncSchedule
from verl.trainer.ppo.stages import PromptSource
from verl.trainer.ppo.step import collect, learn

BOUND = 1
"""Versions by which a token may be older than the policy that trains on it."""
CONTEXT = "context"


class OneStepOffSchedule(SyncSchedule):
    """Off-policy by one version. The last step samples nothing ahead."""

    def __init__(self) -> None:
        super().__init__()
        self._ahead: tuple[StepContext, DataProto] | None = None

    def step(self, source: PromptSource, roles: Roles, ctx: StepContext) -> DataProto:
        """One training batch, learned from while the next one is collected."""
        self.settle(roles, ctx)
        batch = self._batch_of(source, roles, ctx)
        staleness.check(batch, ctx, BOUND)
        if ctx.step >= ctx.total_steps:
            self._ahead = None
            return learn(batch, roles, ctx, self.stages)
        half = ctx.run.open(ctx.step + 1)

        def collect_next() -> DataProto:
            staleness.evict(half, BOUND)
            return collect(source, roles, half)

        if roles["rollout"].group.shares_processes(roles["actor"].group):
            with ctx.stop.droppable():
                collected = collect_next()
            learn(batch, roles, ctx, self.stages)
        else:
            waiting = ctx.timed("wait_for_samples")
            collected, _ = side_by_side(collect_next, lambda: learn(batch, roles, ctx, self.stages), waiting)
        self._ahead = half, collected
        return batch

    def _batch_of(self, source: PromptSource, roles: Roles, ctx: StepContext) -> DataProto:
        """What was collected ahead for this step; the first step of a run collects its own."""
        if self._ahead is None:
            staleness.evict(ctx, BOUND)  # of a queue that a checkpoint had
            with ctx.stop.droppable():
                return collect(source, roles, ctx)
        half, batch = self._ahead
        ctx.take_in(half)
        return batch.select()  # columns are added to it; what was collected stays as it is, for a checkpoint

    def carried(self) -> dict[str, DataProto]:
        """The batch that the next step will train on, with the context that it was collected in."""
        if self._ahead is None:
            return {}
        half, batch = self._ahead
        batch = batch.select()
        batch.meta_info = {**batch.meta_info, CONTEXT: half.state_dict()}
        return {AHEAD: batch}

    def carry_on(self, parts: Mapping[str, DataProto], run: RunState) -> None:
        """Continue with what `carried` returned."""
        if AHEAD not in parts:
            return super().carry_on(parts, run)
        batch, half = parts[AHEAD], run.open(run.step + 1)
        half.load_state_dict(batch.meta_info.pop(CONTEXT), batch)
        self._ahead = half, batch
