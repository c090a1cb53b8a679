"""The journal of a run: opened, compared before a replay begins, and one entry per step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor

from verl.checkpoint.provenance import Provenance, check_replay
from verl.config import PPOTrainerConfig
from verl.config.machine.pools import Pools
from verl.config.rules.queues import samples_while_training
from verl.config.schema.root import of_schedule
from verl.errors import ConfigError
from verl.journal.file import Journal, Position
from verl.journal.ledger import Ledger
from verl.journal.schedule import KEY, ScheduleRecord, Script, digest, finite
from verl.protocol import DataProto
from verl.rollout.base import Moved
from verl.trainer.ppo import accounting, staleness
from verl.trainer.ppo.callbacks import Callback, RunningTrainer
from verl.trainer.ppo.context import RunState, StepContext

TRAINS = ("actor", "critic", "ref", "rm")
PLACE = "journal"
"""Of its name in a checkpoint."""


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
            "groups that were sampled one by one have the same bits only where other requests in the batch change none",
            key="actor_rollout_ref.rollout.full_determinism",
            got=False,
            allowed=[True],
            fix="Record a run with it.",
        )
    return script


class KeepJournal(Callback):
    """Opens what the run writes of itself: the ledger, the decisions of an asynchronous schedule, and the spans."""

    def __init__(self, config: PPOTrainerConfig) -> None:
        self._script = script_of(config)

    def on_load(self, trainer: RunningTrainer) -> None:
        state, checkpoints = trainer.state, trainer.checkpoints
        config, places, position = state.config, checkpoints.places, checkpoints.position
        settings, is_async = config.trainer, of_schedule(config).off_policy
        if settings.val_only or not (settings.ledger or settings.trace or is_async):
            return
        if is_async and self._script is not None:
            self._begin_script(self._script, state.step, position)
        folder = Path(settings.default_local_dir)
        journal = state.journal = Journal(folder, state.step, places.get(PLACE), position)
        places[PLACE] = journal.path.name
        state.ledger = Ledger(journal) if settings.ledger else None
        state.record = ScheduleRecord(journal, self._script) if is_async else None
        about = {
            "processes": _processes(config),
            "beside": samples_while_training(config) and not state.needs_reward_baselines,
            "settings": checkpoints.provenance.settings,
            "content": checkpoints.provenance.content,
        }
        writers = [writer for writer in (state.ledger, state.record) if writer is not None]
        journal.begin(writers, **(about if is_async else {}))
        if state.ledger is not None:
            state.ledger.resume(state.step, accounting.waiting_in(trainer.schedule.stream.held_samples()))
        if settings.trace:
            state.spans.record_in(journal)

    def _begin_script(self, script: Script, step: int, position: Position | None) -> None:
        if step and position is None:
            why = "the checkpoint knows no recorded schedule: no replay can continue from it"
            fix = "Set trainer.resume_mode=disable to replay from the beginning."
            raise ConfigError(why, key=KEY, got=str(script.path), fix=fix)
        script.begin(0 if position is None else position.decisions)

    def on_step_end(self, trainer: RunningTrainer, batch: DataProto) -> None:
        ctx = trainer.ctx
        note_step(batch, ctx)
        accounting.trained(batch, ctx, accounting.was_updated(trainer.roles, ctx))


def note_moved(state: RunState, moved: Sequence[Moved]) -> None:
    """Requests went on at another replica."""
    if state.ledger is not None:
        state.ledger.moved(state.step, moved)


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
    record.add("update", step=ctx.step, samples=digest(samples), oldest=oldest, newest=newest, grad_norm=norm)
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
