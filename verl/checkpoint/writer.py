"""Writing checkpoints so that a kill at any moment leaves the newest complete one usable.

Order of a save: all files in a hidden staging folder, synced; the manifest; one rename to ``global_step_N``; tracker
file; deletion of old ones. Before the rename the new checkpoint does not exist, after it it is complete.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from verl import env
from verl.checkpoint.background import BackgroundPart, PartInWork
from verl.checkpoint.best import BestCheckpoint
from verl.checkpoint.files import (
    FileRecord,
    checked_json_text,
    remove_tree,
    replace_text,
    sync_folder,
    sync_tree_folders,
    write_synced,
)
from verl.checkpoint.find import REPLACED, TRACKER, list_checkpoints, step_folder
from verl.checkpoint.lock import RunLock
from verl.checkpoint.manifest import Manifest
from verl.checkpoint.part import DEFAULT_CONTENTS, HFWriter, check_contents, write_part
from verl.checkpoint.reader import TRAINER
from verl.checkpoint.retention import check_keep, clean, prune_checkpoints
from verl.checkpoint.state import EngineState
from verl.errors import CheckpointError, WorkerError
from verl.metrics import notice
from verl.outcomes import on_error, thread_outcome

WRITING = ".writing-"
PartWriter = Callable[[Path], "Mapping[str, FileRecord] | PartInWork | None"]
"""Writes a role's files into a folder (in a worker, say, by `write_part`); may return what `write_part` returns.

One that writes in the background returns a `PartInWork`, which has the records later.
"""


class Copies(Protocol):
    """Copies of checkpoints elsewhere, made during training."""

    sequence: int
    """Number of the save that was copied last when the run began; 0 where there was none."""

    def add(self, folder: Path) -> None:
        """Copy this checkpoint, which is complete."""

    def catch_up(self, root: Path) -> None:
        """Copy what an earlier run saved there and did not copy any more."""

    def needs(self, folder: Path) -> bool:
        """Whether its files are still to be copied."""

    def finish(self, folder: Path) -> None:
        """Wait until the files of this folder are no longer read."""

    def close(self) -> None:
        """Wait for all copies; raises `CheckpointError` where one cannot be made."""


@dataclass
class _Save:
    """A save that is not in place yet."""

    step: int
    staging: Path
    parts: tuple[str, ...]
    records: dict[str, FileRecord] = field(default_factory=dict)
    waiting: dict[str, PartInWork] = field(default_factory=dict)
    released: bool = False


class CheckpointWriter:
    """The checkpoints of one run folder; holds the folder's lock until `close`.

    Args:
        root: the run folder (``trainer.default_local_dir``).
        keep: role -> how many complete checkpoints stay (``trainer.max_actor_ckpt_to_keep``); None keeps all.
        copies: gets every checkpoint once it is in place; what it still needs is neither deleted nor replaced.
        best: knows the best checkpoint, which is not deleted.
        background: `save` copies the engine states and returns; threads write them. The checkpoint is put in place by
            a later `advance`, `wait`, `save` or `close`, which also raises the error of a write that failed.
        point: called with the name of every point that a save reaches, for tests that kill there.

    Example:
        >>> with CheckpointWriter(root, keep={"actor": 2}) as writer:
        ...     writer.save(step, {"actor": engine.state()}, hf={"actor": engine.hf_writer(tok)}, trainer_state=state)

    Raises:
        CheckpointError: another run uses this folder.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        keep: Mapping[str, int | None] | None = None,
        copies: Copies | None = None,
        best: BestCheckpoint | None = None,
        background: bool = False,
        point: Callable[[str], None] = lambda name: None,
    ):
        self.root = Path(env.expand(str(root)))
        self.keep, self.background, self.point = dict(keep or {}), background, point
        check_keep(self.keep)
        self.copies, self.best = copies, best
        self.published: list[Path] = []
        """Checkpoints that were put in place, the newest last; the caller takes them out."""
        self._save: _Save | None = None
        self._finishing: Future[None] | None = None
        self._background_parts: dict[str, BackgroundPart] = {}
        try:
            self.lock = RunLock(self.root)
            _recover(self.root)
            if best is not None:
                best.recovered()
        except OSError as error:
            raise CheckpointError(
                f"this folder cannot be written: {error}", key="trainer.default_local_dir", got=str(self.root)
            ) from error

    def save(
        self,
        step: int,
        parts: Mapping[str, EngineState | PartWriter],
        hf: Mapping[str, HFWriter] | None = None,
        trainer_state: Mapping[str, Any] | None = None,
        contents: Mapping[str, Sequence[str]] | None = None,
        hold: bool = False,
        texts: Mapping[str, str] | None = None,
    ) -> Path:
        """Save a step.

        Args:
            parts: role -> its state, or a function that writes it.
            hf: role -> writer of its Hugging Face folder.
            trainer_state: the controller's state, as JSON.
            contents: role -> of model, optimizer, extra, hf_model; all but the last by default.
            texts: name -> text of further files in the step folder, which the user alone may read.
            hold: it becomes the checkpoint at `release` only, so that what belongs to its step can be done before.

        Returns:
            The step folder (with ``background`` or ``hold``: where it will be).

        Raises:
            CheckpointError: the disk is full or read-only, or a state cannot be saved; earlier checkpoints are intact.
        """
        self.wait()
        contents, hf = contents or {}, hf or {}
        for names in contents.values():
            check_contents(names)
        staging = self.begin(step, tuple(parts), trainer_state, texts)
        with self.guarded():
            for part, source in parts.items():
                sections = contents.get(part, DEFAULT_CONTENTS)
                self._take(part, self._write(part, source, staging / part, sections, hf.get(part)))
        assert self._save is not None, "it has just begun"
        self._save.released = not hold
        if not self.background:
            self.advance()
        return step_folder(self.root, step)

    def begin(
        self,
        step: int,
        parts: tuple[str, ...],
        trainer_state: Mapping[str, Any] | None = None,
        texts: Mapping[str, str] | None = None,
    ) -> Path:
        """The first half of `save`, for roles that several processes write at once; `complete` is the second.

        Returns:
            The folder in which each role has one of its own. What fails until `complete` belongs into `guarded`.
        """
        self.wait()
        self.lock.check()
        staging = self.root / f"{WRITING}global_step_{step}"
        self._save = _Save(step, staging, parts)
        with self.guarded():
            remove_tree(staging)
            staging.mkdir(parents=True)
            self.point("begin")
            write_synced(staging / TRAINER, checked_json_text(trainer_state or {}, TRAINER))
            for name, text in (texts or {}).items():
                write_synced(staging / name, text, 0o600)
        return staging

    def complete(self, records: Mapping[str, Mapping[str, FileRecord]]) -> None:
        """Put in place what was written since `begin`: role -> records of the files that all processes wrote."""
        with self.guarded():
            for part, files in records.items():
                self._take(part, files)
        self.release()

    def release(self) -> None:
        """Let the newest save become the checkpoint, at once or, in the background, when it is written."""
        if self._save is not None:
            self._save.released = True
            self.advance()

    def discard(self) -> bool:
        """Drop the newest save if it is held and not released; whether there was one."""
        if self._save is None or self._save.released or self._finishing is not None:
            return False
        self._give_up(CheckpointError("it is dropped"))
        return True

    def advance(self) -> None:
        """Without waiting: put a save in the background into place if it is written and released.

        Raises:
            CheckpointError: it failed; earlier checkpoints are intact.
        """
        save = self._save
        if self._finishing is not None and self._finishing.done():
            self._join()
        elif save is not None and self._finishing is None:
            for part, work in list(save.waiting.items()):
                with self.guarded():
                    records = work.poll()
                self._take(part, work if records is None else records)
            if save.released and not save.waiting:
                self._finish_or_start_it(save)

    def wait(self) -> None:
        """Finish what is being written, released or not; the error of a save in the background is raised here."""
        save = self._save
        if save is not None and self._finishing is None:
            for part, work in list(save.waiting.items()):
                with self.guarded():
                    self._take(part, work.wait())
            self._finish_or_start_it(save)
        self._join()

    def close(self) -> None:
        """Finish what is being written, copies and the deletions of a run that was killed too, and release the folder.

        Raises:
            CheckpointError: a save in the background failed, or a copy elsewhere.
        """
        try:
            self.wait()
            if self.copies is not None:
                self.copies.close()
            prune_checkpoints(self.root, self.keep, needed=self._needed)
        finally:
            self.lock.release()

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(
        self, part: str, source: EngineState | PartWriter, folder: Path, contents: Sequence[str], hf: HFWriter | None
    ) -> Mapping[str, FileRecord] | PartInWork | None:
        if not isinstance(source, EngineState):
            return source(folder)
        point = partial(self._part_point, part)
        if not self.background:
            return write_part(folder, source, contents, hf, point)
        work = self._background_parts.setdefault(part, BackgroundPart())
        work.start(folder, source, contents, hf, point)
        return work

    def _take(self, part: str, outcome: Mapping[str, FileRecord] | PartInWork | None) -> None:
        """Note the records of a role, or that they are still to come."""
        assert self._save is not None, "no save is in work"
        if outcome is None or isinstance(outcome, Mapping):
            self._save.waiting.pop(part, None)
            self._save.records |= {f"{part}/{name}": record for name, record in (outcome or {}).items()}
        else:
            self._save.waiting[part] = outcome

    def _finish_or_start_it(self, save: _Save) -> None:
        if self.background:
            self._finishing = thread_outcome(partial(self._finish, save), f"checkpoint-{save.step}")
        else:
            with self.guarded():
                self._finish(save)
            self._save = None

    def _join(self) -> None:
        finishing = self._finishing
        if finishing is None:
            return
        wait([finishing])
        self._finishing = None
        with self.guarded():
            finishing.result()
        self._save = None

    def _finish(self, save: _Save) -> None:
        elsewhere = 0 if self.copies is None else self.copies.sequence
        sequence = 1 + max((c.manifest.sequence for c in list_checkpoints(self.root)), default=0)
        sequence = max(sequence, 1 + elsewhere)
        manifest = Manifest.of(save.staging, save.step, sequence, save.parts, save.records)
        self.point("files")
        sync_tree_folders(save.staging)
        manifest.write(save.staging)
        self.point("manifest")
        if self.copies is not None:
            self.copies.finish(step_folder(self.root, save.step))
        put_in_place(self.root, save.step, save.staging, self.point)
        self.published.append(step_folder(self.root, save.step))
        if self.copies is not None:
            self.copies.add(step_folder(self.root, save.step))
        self._after(save.step)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """An error within the block ends the save; an error of the disk becomes a `CheckpointError`."""
        with on_error(self._give_up):
            yield

    def _part_point(self, part: str, name: str) -> None:
        self.point(f"{part}/{name}")

    def _after(self, step: int) -> None:
        """The checkpoint is published; what fails from here on is a notice and does not undo it."""
        try:
            if self.best is not None:
                self.best.published()  # before retention: the file never names a deleted one
                self.point("best")
            replace_text(self.root / TRACKER, f"{step}\n")
            self.point("tracker")
            prune_checkpoints(self.root, self.keep, self.point, self._needed)
        except OSError as error:
            notice(f"checkpoint {step}", f"it was saved, but the work after it failed: {error}")
        self.point("end")

    def _needed(self, folder: Path) -> bool:
        is_best = self.best is not None and self.best.holds(folder)
        return is_best or (self.copies is not None and self.copies.needs(folder))

    def _give_up(self, error: BaseException) -> None:
        """Remove what was written, and tell an error of the disk, or of another rank, in our own words."""
        save, self._save = self._save, None
        if save is None:
            return
        for work in save.waiting.values():
            with suppress(Exception):  # boundary: the first error is the one that is reported
                work.wait()
        try:
            remove_tree(save.staging)
        except OSError as second:
            notice(f"checkpoint {save.step}", f"{save.staging} could not be removed: {second}")
        if isinstance(error, OSError | WorkerError):
            intact = list_checkpoints(self.root)
            raise CheckpointError(
                f"step {save.step} could not be saved: {error}",
                key="trainer.default_local_dir",
                got=str(self.root),
                fix=f"The newest intact checkpoint is {intact[0].folder}."
                if intact
                else "There is no earlier checkpoint.",
            ) from error


def put_in_place(root: Path, step: int, staging: Path, point: Callable[[str], None] = lambda name: None) -> Path:
    """Rename a finished folder to the step's. An older save of the same step steps aside first, and is found there
    until then.
    """
    target = step_folder(root, step)
    aside = target.with_name(f"{REPLACED}{target.name}")
    if target.exists():
        remove_tree(aside)
        os.rename(target, aside)
        point("replaced")
    os.rename(staging, target)
    point("published")
    sync_folder(root)
    remove_tree(aside)
    return target


def _recover(root: Path) -> None:
    """Under the lock: undo what a killed run left half done."""
    for leftover in root.glob(f"{WRITING}*"):
        remove_tree(leftover)
    clean(root)
    for aside in root.glob(f"{REPLACED}*"):
        target = aside.with_name(aside.name.removeprefix(REPLACED))
        if target.exists():
            remove_tree(aside)
        else:
            os.rename(aside, target)
