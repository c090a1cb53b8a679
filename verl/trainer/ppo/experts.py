"""The experts of a mixture in the dataflow: what the sampler recorded, how even it is, and which pass reads it."""

from __future__ import annotations

import torch

from verl.config.machine.config_json import experts_of, facts_of
from verl.errors import RolloutError
from verl.metrics import Reduction
from verl.models.router_replay import COLUMN, NO_RECORD
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
    """Report how evenly the sampler used its experts, at the set interval of steps; leave out what nothing else reads.

    All are of response tokens, under ``rollout/moe``. A layer's load is its busiest expert's share over the mean share.

    - ``max_share``: the largest share of one expert in the choices of a layer;
    - ``max_load``: the load of the worst layer;
    - ``max_violation``: the load less one, mean over layers; 0 if all experts get as much (MaxVio; Wang et al. 2024,
      arXiv 2408.15664, section 4.1);
    - ``entropy``: of a layer's shares, in nats, mean over layers;
    - ``dead_experts``: how many experts, of all layers together, no token chose.
    """
    interval = ctx.config.actor_rollout_ref.rollout.moe_load_balance_metrics_interval
    if COLUMN not in samples.tensors.keys():
        return
    if interval > 0 and ctx.step % interval == 0:
        num_experts = experts_of(facts_of(ctx.config.actor_rollout_ref.model.path) or {})
        for name, value in balance(samples, num_experts).items():
            kind: Reduction = "max" if name in ("max_share", "max_load") else "mean"
            ctx.metrics.add(f"rollout/moe/{name}", value, kind, weight=int(samples.tensors["response_mask"].sum()))
    if mode_of(ctx) != "R3":
        samples.tensors.pop(COLUMN)


def balance(samples: DataProto, num_experts: int | None) -> dict[str, float]:
    """See `measure`; what needs the number of experts only where it is known, nothing where no token has a record."""
    routing = samples.tensors[COLUMN][:, -samples.tensors["responses"].shape[1] :]
    routing = routing[routing[..., 0, 0] != NO_RECORD].long()
    if not len(routing):
        return {}
    layers = routing.shape[1]
    experts = num_experts or int(routing.max()) + 1
    counts = torch.stack([torch.bincount(routing[:, layer].flatten(), minlength=experts) for layer in range(layers)])
    shares = counts.double() / counts.sum(-1, keepdim=True)
    metrics = {"max_share": float(shares.max()), "entropy": float(torch.special.entr(shares).sum(-1).mean())}
    if num_experts is None:
        return metrics
    loads = shares.amax(-1) * experts
    metrics |= {"max_load": float(loads.max()), "max_violation": float(loads.mean()) - 1}
    return {**metrics, "dead_experts": float((counts == 0).sum())}
