"""The synchronous schedule: sample with the newest weights, learn, publish the new weights.

With ``trainer.async_weight_update`` they are on their way while the controller writes and logs what the step brought;
before anything is sampled they have arrived. So the numbers are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from verl.config import PPOTrainerConfig
from verl.metrics import notice
from verl.protocol import DataProto
from verl.single_controller.base import Roles
from verl.trainer.ppo import reloading, staleness
from verl.trainer.ppo.context import RunState, StepContext
from verl.trainer.ppo.groups import samples_of_queue
from verl.trainer.ppo.stages import PromptSource
from verl.trainer.ppo.step import Stage, collect, learn
from verl.workers.model import ModelRole
from verl.workers.sending import SyncResult

AHEAD = "ahead"
"""The part of a checkpoint with the batch that another schedule has sampled for the next step."""
RESUMED = "trainer.v1.trainer_mode, resumed run"
"""Key of what is said of a run that goes on under another schedule."""


class SyncSchedule:
    """On-policy: every batch is sampled by the weights that it then updates, but for what an earlier step left
    unfinished (``rollout.keep_unfinished``).

    A recipe may add models (`added_roles`) and stages between the samples and their advantages (`stages`).
    """

    stages: tuple[Stage, ...] = ()

    @classmethod
    def added_roles(cls, config: PPOTrainerConfig) -> list[ModelRole]:
        """Models besides the library's roles, in the order in which they are built."""
        return []

    def __init__(self) -> None:
        self._on_their_way: Any = None
        self._version = 0

    def step(self, source: PromptSource, roles: Roles, ctx: StepContext) -> DataProto:
        """One training batch, collected and learned from."""
        self.settle(roles, ctx)
        with ctx.stop.droppable():
            batch = collect(source, roles, ctx)
        if ctx.unfinished is not None:
            staleness.check(batch, ctx, bound=ctx.step)
        return learn(batch, roles, ctx, self.stages)

    def publish(self, roles: Roles, ctx: StepContext) -> None:
        """The sampler generates with the updated policy from here on."""
        group = roles["actor"].group
        if ctx.run.record is not None:
            ctx.run.record.weights(ctx.step)
        with ctx.timed("update_weights"):
            if ctx.config.trainer.async_weight_update:
                self._on_their_way, self._version = group.begin_weight_update(ctx.step), ctx.step
            else:
                _admit(roles, ctx, group.send_weights(ctx.step), ctx.step)

    def settle(self, roles: Roles, ctx: StepContext) -> None:
        """Return once the sampler has the latest published weights; raises their transfer's error."""
        group, references, self._on_their_way = roles["actor"].group, self._on_their_way, None
        if references is not None:
            with ctx.timed("wait_for_weights"):
                group.wait(references)
                _admit(roles, ctx, group.end_weight_update(), self._version)

    def held_samples(self) -> Iterable[DataProto]:
        """The samples that the schedule holds between two steps, besides those in the run's pool."""
        return self.carried().values()

    def steps_of(self, config: PPOTrainerConfig, batches: int) -> int:
        """Steps in an epoch of so many batches of prompts."""
        return batches

    def length_of(self, config: PPOTrainerConfig, steps_per_epoch: int) -> int:
        """Steps of the run."""
        return config.trainer.total_training_steps or steps_per_epoch * config.trainer.total_epochs

    def close(self) -> None:
        """The run ends, in whatever way."""

    def carried(self) -> dict[str, DataProto]:
        """Batches that are between sampling and training when a step is over: parts of a checkpoint, by name."""
        return {}

    def carry_on(self, parts: Mapping[str, DataProto], run: RunState) -> None:
        """Continue with what `carried` returned, perhaps in a run under another schedule; nothing sampled is lost."""
        if AHEAD in parts:
            notice(RESUMED, "the first batch is the one that the run had sampled ahead")
            run.pool.add(parts[AHEAD])
        groups, num_prompts = samples_of_queue(parts)
        if groups is not None:
            notice(RESUMED, f"the first {len(groups)} samples are those that waited in its queue")
            run.pool.add(groups)
        if num_prompts:
            why = "were drawn from the data and not sampled to their end, and are left out of this epoch"
            notice(f"{RESUMED}, prompts", f"{num_prompts} prompts {why}")


def _admit(roles: Roles, ctx: StepContext, sent: list[SyncResult], version: int) -> None:
    roles["rollout"].group.publish(version, SyncResult.by_all(sent))
    reloading.check(roles, ctx, version)
