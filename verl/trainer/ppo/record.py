"""The recorded schedule of a run: opened, compared before a replay begins, and told of each step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor

from verl.config import PPOTrainerConfig
from verl.config.pools import Pools
from verl.config.provenance import Provenance, check_replay
from verl.config.queues import samples_beside
from verl.config.root import of_schedule
from verl.errors import ConfigError
from verl.observability.schedule import KEY, ScheduleRecord, Script, digest, finite
from verl.protocol import DataProto
from verl.trainer.ppo import staleness
from verl.trainer.ppo.context import RunState, StepContext

TRAINS = ("actor", "critic", "ref", "rm")
PLACE = "schedule"
"""Of the record's name in a checkpoint."""


def script_of(config: PPOTrainerConfig) -> Script | None:
    """What ``trainer.replay_from`` names, for a run that may follow it; None where it names nothing.

    Raises:
        ConfigError: this run would have other numbers; it names every key that differs.
        DataError: there is no record, or it cannot be followed.
    """
    place = config.trainer.replay_from
    if place is None:
        return None
    script = Script.read(Path(place))
    recorded = Provenance(script.about["settings"], script.about["content"])
    were, are = script.about["processes"], _processes(config)
    counts = {f"processes of {role}": (were.get(role), are[role]) for role in are if were.get(role) != are[role]}
    check_replay(Provenance.of(config), recorded, script.path, counts)
    if script.about["beside"] and not config.actor_rollout_ref.rollout.full_determinism:
        raise ConfigError(
            "groups that were sampled one by one have the same bits only where what is beside them changes none",
            key="actor_rollout_ref.rollout.full_determinism",
            got=False,
            allowed=[True],
            fix="Record a run with it.",
        )
    return script


def open_record(
    config: PPOTrainerConfig,
    state: RunState,
    provenance: Provenance,
    places: Mapping[str, str],
    count: int | None,
    script: Script | None,
) -> ScheduleRecord | None:
    """The record of a run under an asynchronous schedule, which nobody else writes.

    Args:
        places: names of files, of the checkpoint that the run goes on from.
        count: decisions that this checkpoint knows.
    """
    if not of_schedule(config).off_policy:
        return None
    if script is not None:
        if state.step and count is None:
            raise ConfigError("the checkpoint knows no recorded schedule, so no replay can go on from it", key=KEY,
                got=str(script.path), fix="Set trainer.resume_mode=disable to replay from the beginning.")  # fmt: skip
        script.begin(count or 0)
    about = {
        "processes": _processes(config),
        "beside": samples_beside(config) and not state.open(0).needs_reward_baselines,
        "settings": provenance.settings,
        "content": provenance.content,
    }
    folder = Path(config.trainer.default_local_dir)
    return ScheduleRecord(folder, about, state.step, places.get(PLACE), count, script)


def note_step(batch: DataProto, ctx: StepContext) -> None:
    """A step has trained on a batch."""
    record = ctx.run.record
    if record is None:
        return
    columns, tensors = batch.non_tensor_batch, batch.tensors
    width = tensors["responses"].shape[-1]
    masks, scores = tensors["attention_mask"][:, -width:].bool(), tensors["token_level_scores"]
    samples = zip(
        map(str, columns["uid"]),
        map(int, columns["sample_index"]),
        _chosen(tensors["responses"], masks),
        _chosen(scores, scores != 0),
        strict=True,
    )
    versions = staleness.versions_of(batch)
    oldest, newest = (None, None) if versions is None or not len(versions[0]) else (
        int(versions[0].min()), int(versions[1].max()))  # fmt: skip
    norm = finite(ctx.metrics.values().get("actor/grad_norm"))
    record.add("trained", step=ctx.step, samples=digest(samples), oldest=oldest, newest=newest, grad_norm=norm)
    if record.script is not None:
        left = len(record.script.decisions) - record.script.at
        ctx.metrics.add("replay/decisions_left", float(left), "last")


def _chosen(values: Tensor, mask: Tensor) -> Iterator[list[Any]]:
    """What each row (T) of the values (B, T) has where the mask (B, T) is true."""
    flat = iter(values[mask].tolist())
    return (list(islice(flat, count)) for count in mask.sum(-1).tolist())


def _processes(config: PPOTrainerConfig) -> dict[str, Any]:
    """How many share the sums of each model."""
    pools = Pools.of(config)
    return {role: pools.of_role(role).size for role in TRAINS}
