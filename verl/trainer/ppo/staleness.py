"""How old the weights are that drew what a step trains on: measured, bounded, and checked on every token.

Version v is what step v published, 0 the first weights. Step s updates version s - 1, so a token of version v is
s - 1 - v versions old. Shapes: B rows, T response tokens.
"""

from __future__ import annotations

from torch import Tensor

from verl.errors import RolloutError
from verl.metrics import notice
from verl.protocol import DataProto
from verl.trainer.ppo.context import StepContext
from verl.trainer.ppo.trajectories import version_bounds

VERSIONS = "token_versions"
PREFIX = "training/off_policy"


def versions_of(batch: DataProto) -> tuple[Tensor, Tensor] | None:
    """Oldest and newest version (N,) of each of the N rows with sampled tokens; None if the sampler names none."""
    rows = _versions(batch)
    if rows is None:
        return None
    oldest, newest, is_drawn = rows
    return oldest[is_drawn], newest[is_drawn]


def _versions(batch: DataProto) -> tuple[Tensor, Tensor, Tensor] | None:
    """Oldest and newest version (B,), and whether a row has any (B,)."""
    if VERSIONS not in batch.tensors.keys():
        return None
    oldest, newest = version_bounds(batch)  # padding and inserted text have -1
    return oldest, newest, newest >= 0


def check(batch: DataProto, ctx: StepContext, bound: int | None) -> None:
    """Report the staleness of a batch that step ``ctx.step`` trains on, and hold every token of it to the bound.

    Raises:
        RolloutError: a token is older than that, or of a version that this step has not.
    """
    rows = versions_of(batch)
    if rows is None:
        notice(
            VERSIONS, "the agent loop names no versions, so the staleness of samples can be neither shown nor checked"
        )
        return
    oldest, newest = rows
    if not len(oldest):
        return
    current = ctx.step - 1
    measures = {
        "trajectory_spans": newest - oldest + 1,
        "trajectory_staleness": current - newest,
        "trajectory_staleness_worst": current - oldest,
    }
    for name, values in measures.items():
        _report(ctx, name, values)
    worst, least = int(current - oldest.min()), int(current - newest.max())
    bound = worst if bound is None else bound
    if worst > bound or least < 0:
        raise RolloutError(
            f"step {ctx.step} trains version {current}, and a sample has tokens of version "
            f"{int(oldest.min() if worst > bound else newest.max())}",
            key="trainer.v1.trainer_mode",
            got=f"{worst if worst > bound else least} versions old",
            allowed=f"0 to {bound}",
            fix="This is a fault of the schedule or of the sampler, not of a setting.",
        )


def measure_dropped(samples: DataProto, ctx: StepContext) -> None:
    """Report samples that are dropped, as step ``ctx.step`` would train on tokens that are too old."""
    rows = _versions(samples)
    ctx.metrics.add(f"{PREFIX}/evicted_samples", len(samples), "sum")
    if rows is not None:
        oldest, _, drawn = rows
        _report(ctx, "evicted_samples_staleness", (ctx.step - 1 - oldest)[drawn])


def _report(ctx: StepContext, name: str, values: Tensor) -> None:
    ctx.metrics.add(f"{PREFIX}/{name}/mean", values.double().mean().item(), weight=len(values))
    ctx.metrics.add(f"{PREFIX}/{name}/max", values.max().item(), "max")
    ctx.metrics.add(f"{PREFIX}/{name}/min", values.min().item(), "min")
