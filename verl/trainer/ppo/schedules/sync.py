"""The synchronous schedule: sample with the newest weights, learn, hand the new weights over."""

from __future__ import annotations

from verl.protocol import DataProto
from verl.single_controller.base import Roles
from verl.trainer.ppo.context import StepContext
from verl.trainer.ppo.stages import PromptSource
from verl.trainer.ppo.step import collect, learn


class SyncSchedule:
    """On-policy: every batch is sampled by the weights that it then updates."""

    def step(self, source: PromptSource, roles: Roles, ctx: StepContext) -> DataProto:
        """One training batch, collected and learned from."""
        with ctx.stop.droppable():
            batch = collect(source, roles, ctx)
        return learn(batch, roles, ctx)

    def publish(self, roles: Roles, ctx: StepContext) -> None:
        """The sampler generates with the updated policy from here on."""
        with ctx.timed("update_weights"):
            roles["rollout"].group.update_weights(ctx.step)
