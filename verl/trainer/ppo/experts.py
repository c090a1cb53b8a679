"""The experts of a mixture in the dataflow: what the sampler recorded, how even it is, and which pass reads it."""

from __future__ import annotations

from verl.config.machine.config_json import experts_of, facts_of
from verl.errors import RolloutError
from verl.metrics import Reduction
from verl.models.router_replay import COLUMN, expert_balance
from verl.protocol import DataProto
from verl.trainer.ppo.context import StepContext

MODE = "actor_rollout_ref.actor.router_replay.mode"


def mode_of(ctx: StepContext) -> str:
    """What is replayed: disabled, R2 or R3."""
    return str(ctx.config.actor_rollout_ref.actor.router_replay.mode)


def for_pass(batch: DataProto, role: str, ctx: StepContext) -> DataProto:
    """The batch as a model reads it without a gradient: with the sampler's experts where it replays these.

    Raises:
        RolloutError: it replays them, and no sample came with any.
    """
    if role == "actor":
        _check(batch, ctx)
    reference = ctx.config.actor_rollout_ref.ref.router_replay.mode != "disabled"
    replays = {"actor": mode_of(ctx) == "R3", "ref": reference}.get(role, False)
    return batch if replays else _without(batch)


def for_update(batch: DataProto, role: str, ctx: StepContext) -> DataProto:
    """The batch as an update reads it: with the experts that the actor replays, the sampler's or those of its pass.

    Raises:
        RolloutError: as `for_pass`.
    """
    if role != "actor" or mode_of(ctx) == "disabled":
        return _without(batch)
    _check(batch, ctx)
    return batch


def _without(batch: DataProto) -> DataProto:
    """The batch for a model that chooses its experts itself."""
    if COLUMN not in batch.tensors.keys():
        return batch
    return batch.select(batch_keys=[key for key in batch.tensors.keys() if key != COLUMN])


def _check(batch: DataProto, ctx: StepContext) -> None:
    if mode_of(ctx) == "R3" and COLUMN not in batch.tensors.keys():
        message = "the sampler's experts are to be replayed, and no sample came with them"
        fix = "Does the agent loop hand on routed_experts of the answers that it gets (AgentLoopOutput.routed_experts)?"
        raise RolloutError(message, key=MODE, got="R3", fix=fix)


def measure(samples: DataProto, ctx: StepContext) -> None:
    """Report how evenly the sampler used its experts (``rollout/moe``, response tokens), at the set interval of steps.

    What nothing else reads is left out of the batch.
    """
    interval = ctx.config.actor_rollout_ref.rollout.moe_load_balance_metrics_interval
    if COLUMN not in samples.tensors.keys():
        return
    if interval > 0 and ctx.step % interval == 0:
        routing = samples.tensors[COLUMN][:, -samples.tensors["responses"].shape[1] :]
        num_experts = experts_of(facts_of(ctx.config.actor_rollout_ref.model.path) or {})
        for name, value in expert_balance(routing, num_experts).items():
            kind: Reduction = "max" if name in ("max_share", "max_load") else "mean"
            ctx.metrics.add(f"rollout/moe/{name}", value, kind, weight=int(samples.tensors["response_mask"].sum()))
    if mode_of(ctx) != "R3":
        samples.tensors.pop(COLUMN)
