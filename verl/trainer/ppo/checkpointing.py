"""What an RL run saves and continues from: the trained roles, the place in the data, the controller's own state.

A reference policy that moves (``trainer.ref_update_freq``) is saved, too; one that does not is the model at its path.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from verl.checkpoint import (
    BackgroundCopies,
    BestCheckpoint,
    CheckpointReader,
    CheckpointWriter,
    FileRecord,
    RemoteCheckpoints,
    find_or_fetch,
    noted_reading,
)
from verl.checkpoint.manifest import MANIFEST
from verl.checkpoint.provenance import Provenance, check_resume
from verl.checkpoint.retention import delete
from verl.config import PPOTrainerConfig
from verl.data.loader import PromptSource
from verl.errors import CheckpointError, VerlError
from verl.journal.file import Position
from verl.metrics import notice
from verl.protocol import DataProto
from verl.single_controller.base import WorkerGroup, by_rank
from verl.trainer import rng
from verl.trainer.ppo.context import RunState
from verl.trainer.ppo.stream import GroupStream
from verl.workers.model import ModelWorker
from verl.workers.roles import Roles

REFERENCE, BATCH = "ref", "batch"


@dataclass(frozen=True)
class Boundary:
    """The controller between two steps, which is where a run can be continued.

    Args:
        step: the last complete one.
        state: what goes into ``trainer.json``.
        batches: what waits in the stream for a later step, by the name of its part.
        position: in the run's journal, where there is one.
    """

    step: int
    state: Mapping[str, Any]
    batches: Mapping[str, DataProto]
    position: Position | None


class GroupInWork:
    """A role's files that its workers are writing."""

    def __init__(self, group: WorkerGroup):
        self._group = group

    def poll(self) -> Mapping[str, FileRecord] | None:
        return _of_all(by_rank(self._group, ModelWorker.checkpoint_records)(wait=False))

    def wait(self) -> Mapping[str, FileRecord]:
        return _of_all(by_rank(self._group, ModelWorker.checkpoint_records)(wait=True)) or {}


def _of_all(answers: Sequence[Mapping[str, FileRecord] | None]) -> dict[str, FileRecord] | None:
    """The records of the files of all ranks; None while one is still writing."""
    records: dict[str, FileRecord] = {}
    for answer in answers:
        if answer is None:
            return None
        records |= answer
    return records


class RunCheckpoints:
    """Saves and resumes one RL run; holds the lock of its folder while it may write.

    A checkpoint is put in place after its step was logged: a run that continues from it has lost no metrics, and the
    trackers replace those of the steps that it repeats. Every trainable role is saved under its name.
    """

    def __init__(
        self, config: PPOTrainerConfig, roles: Roles, source: PromptSource, run: RunState, stream: GroupStream
    ):
        self.config, self.roles, self.source, self.run = config, roles, source, run
        self.stream = stream
        trainer = config.trainer
        self.folder = Path(trainer.default_local_dir).absolute()  # a worker may run in another directory
        self.writer: CheckpointWriter | None = None
        self.provenance = Provenance.of(config)
        self.places: dict[str, str] = {}
        """Other places that the run writes to, by tracker or setting: names, kept in each checkpoint."""
        self.resumed = False
        self.position: Position | None = None
        """Of the newest complete checkpoint in the run's journal."""
        self.on_saved: Callable[[int, Path, bool], None] | None = None
        """Called after each complete checkpoint: its step, its folder, whether it was written in the background."""
        self._positions: dict[int, Position] = {}
        """Step -> position of a checkpoint that is being written."""
        self._boundary: Boundary | None = None
        self._has_saved = False
        self._loaded: Path | None = None
        """The checkpoint that was resumed from, if it is to be deleted."""
        self._saved: tuple[int, Path] | None = None
        self._reference_moves = config.trainer.ref_update_freq is not None and REFERENCE in roles
        self.remote = RemoteCheckpoints.of(trainer)
        self.copies: BackgroundCopies | None = None
        if trainer.save_freq > 0:
            self.copies = None if self.remote is None else BackgroundCopies(self.remote)
            keep = {"actor": trainer.max_actor_ckpt_to_keep, "critic": trainer.max_critic_ckpt_to_keep}
            background = any(self._section(name).async_save for name in self._trained())
            best = BestCheckpoint.of(trainer)
            self.writer = CheckpointWriter(self.folder, keep=keep, copies=self.copies, best=best, background=background)

    def save(self) -> Path:
        """Write ``global_step_<step>``, which `end_step` puts in place; earlier checkpoints stay if it fails."""
        return self._save(self._here())

    def has_saved(self, step: int) -> bool:
        """Whether a checkpoint of this step was made."""
        return self._saved is not None and self._saved[0] == step

    def end_step(self, metrics: Mapping[str, float]) -> None:
        """After a step was logged: its checkpoint, if there is one, may be found; a dropped step goes back to here."""
        if self.run.ledger is not None:
            self.run.ledger.end(self.run.step)
        if self.run.journal is not None and self.has_saved(self.run.step):
            self.run.journal.sync()  # its checkpoint, which is put in place next, has its place in it
        if self.writer is not None:
            if self.writer.best is not None and self.has_saved(self.run.step):
                self.writer.best.offer(self.run.step, metrics)
            self.writer.release()
        self.remember()
        self._tell_saved()
        self._delete_loaded()
        if self.run.journal is not None:
            positions = [*self._positions.values(), *([] if self.position is None else [self.position])]
            oldest = min(positions, key=lambda position: position.entries, default=None)
            self.run.journal.rotate(self.run.step, oldest, self.config.trainer.journal_max_bytes)

    def discard(self) -> bool:
        """Drop a checkpoint whose step could not be logged, so that a run resumes from the previous one."""
        return self.writer is not None and self.writer.discard()

    def remember(self) -> None:
        """Record the controller's state for `save_boundary`."""
        if self.writer is not None:
            self._boundary = self._here()

    def save_boundary(self) -> str:
        """Save the state after the last complete step, the one in progress being dropped; returns what to tell."""
        if self.writer is None:
            return f"stopped at step {self.run.step}; nothing is saved, because trainer.save_freq is not set"
        boundary = self._boundary
        if boundary is None or boundary.step == 0:
            return "stopped before the first step was complete; there is nothing to save"
        if not self.has_saved(boundary.step):
            if self.run.journal is not None:
                self.run.journal.sync()
            self._save(boundary)
        self.writer.wait()
        self._tell_saved()
        assert self._saved is not None, "it was just saved"
        return f"stopped after step {boundary.step}, which is saved in {self._saved[1]}"

    def _here(self) -> Boundary:
        state = {
            "step": self.run.step,
            "data": self.source.state_dict(),
            "kl": self.run.kl_controller.state_dict(),
            "rng": rng.rng_state(),
        }
        journal, record = self.run.journal, self.run.record
        if record is not None:
            record.boundary = self.run.step
        position = None if journal is None else journal.position(0 if record is None else record.count)
        return Boundary(self.run.step, state, self.stream.state(), position)

    def _save(self, boundary: Boundary) -> Path:
        if self.writer is None:
            raise CheckpointError("saving is off", key="trainer.save_freq", fix="Set trainer.save_freq.")
        parts: dict[str, Callable[[Path], Any]] = {name: self._role_writer(name) for name in self._trained()}
        if self._reference_moves:
            reference = self.roles[REFERENCE].group
            parts[REFERENCE] = lambda folder: _of_all(
                by_rank(reference, ModelWorker.save_checkpoint)(str(folder), ("model",))
            )
        for name, batch in boundary.batches.items():
            parts[name] = partial(_save_batch, batch)
        texts = self.provenance.files(self.places) | ({} if boundary.position is None else boundary.position.files())
        folder = self.writer.save(boundary.step, parts, trainer_state=boundary.state, hold=True, texts=texts)
        self._saved = (boundary.step, folder)
        if boundary.position is not None:
            self._positions[boundary.step] = boundary.position
        return folder

    def load(self) -> None:
        """Continue from the checkpoint that ``trainer.resume_mode`` names, if there is one.

        Raises:
            ConfigError: its run had settings that change results, and ``trainer.resume_changed`` does not accept that.
        """
        trainer, accept = self.config.trainer, self.config.trainer.resume_changed == "accept"
        folder = find_or_fetch(self.folder, trainer.resume_mode, trainer.resume_from_path, self.remote)
        if folder is not None:
            with noted_reading(self.folder, folder):
                self._load(folder, accept)
        if self.copies is not None:
            self.copies.catch_up(self.folder)
        if trainer.del_local_ckpt_after_load and folder is not None and self.writer is not None:
            self._loaded = folder

    def _load(self, folder: Path, accept: bool) -> None:
        self.places = dict(check_resume(self.provenance, folder, accept))
        reader = CheckpointReader(folder)
        for name, handle in self.roles.items():
            if handle.kind == "trainable":
                section = self._section(name)
                contents = tuple(section.load_contents or section.save_contents)
                by_rank(handle.group, ModelWorker.load_checkpoint)(str(folder / name), contents)
        if REFERENCE in reader.parts and REFERENCE in self.roles:
            reference = self.roles[REFERENCE].group
            by_rank(reference, ModelWorker.load_checkpoint)(str(folder / REFERENCE), ("model",))
            self._reference_moves = True  # it is no longer the model at its path, even if it does not change again
        state = reader.trainer_state()
        self.source.load_state_dict(state["data"])
        self.run.kl_controller.load_state_dict(state["kl"])
        rng.set_rng_state(state["rng"])
        self.run.step = int(state["step"])
        self.position = Position.read(folder)
        if self.position is None and "decisions" in state:  # of a release with a file for them
            self.position = Position(0, "", int(state["decisions"]))
        saved = [name for name in reader.parts if (folder / name / BATCH).is_file()]
        batches = {name: DataProto.load_from_disk(str(folder / name / BATCH)) for name in saved}
        self.stream.load_state(batches)
        self._saved, self.resumed = (self.run.step, folder), True
        notice("trainer.resume_mode", f"continues from {folder}")

    def close(self) -> None:
        """Finish what is being written and release the folder; an error that ends the run goes before one of these."""
        if self.writer is None:
            return
        failing = sys.exc_info()[1] is not None
        try:
            try:
                self.writer.close()
            finally:  # a copy elsewhere that failed takes nothing from what is in place here
                self._tell_saved()
            self._delete_loaded()
        except VerlError as error:
            if not failing:
                raise
            notice("trainer.save_freq", f"the end of the run met a second error: {error}")

    def _tell_saved(self) -> None:
        while self.writer is not None and self.writer.published:
            folder, self._has_saved = self.writer.published.pop(0), True
            step = int(folder.name.rpartition("_")[2])
            self.position = self._positions.pop(step, None) or self.position
            if self.on_saved is not None:
                self.on_saved(step, folder, self.writer.background)

    def _delete_loaded(self) -> None:
        """Delete what was resumed from once something else can be: a newer checkpoint, or its copy elsewhere."""
        folder = self._loaded
        if folder is None:
            return
        if not (folder / MANIFEST).is_file():  # retention, or a save of the same step, was faster
            self._loaded = None
            return
        copied = self.copies is not None and folder.parent == self.folder and not self.copies.needs(folder)
        is_best = self.writer is not None and self.writer.best is not None and self.writer.best.holds(folder)
        if (copied or self._has_saved) and not is_best:
            self._loaded = None
            delete(folder.parent, folder)
            notice(f"checkpoint {folder}", "it was resumed from and is deleted (trainer.del_local_ckpt_after_load)")

    def _trained(self) -> list[str]:
        return [name for name, handle in self.roles.items() if handle.kind == "trainable"]

    def _role_writer(self, name: str) -> Callable[[Path], Any]:
        group, section = self.roles[name].group, self._section(name)
        contents = tuple(section.save_contents)
        if not section.async_save:
            return lambda folder: _of_all(by_rank(group, ModelWorker.save_checkpoint)(str(folder), contents))

        def start(folder: Path) -> GroupInWork:
            by_rank(group, ModelWorker.save_checkpoint)(str(folder), contents, background=True)
            return GroupInWork(group)

        return start

    def _section(self, name: str) -> Any:
        """A role that a recipe added is saved as the actor is."""
        return (self.config.critic if name == "critic" else self.config.actor_rollout_ref.actor).checkpoint


def _save_batch(batch: DataProto, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    batch.save_to_disk(str(folder / BATCH))
