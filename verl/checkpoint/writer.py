"""Writing checkpoints so that a kill at any moment leaves the newest complete one usable.

Order of a save: all files in a hidden folder beside, synced; the manifest; one rename to ``global_step_N``; the tracker
file; deletion of old ones. Before the rename the new checkpoint does not exist, after it it is complete.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from verl import env
from verl.checkpoint.files import (
    FileRecord,
    remove_tree,
    replace_text,
    sync_folder,
    sync_tree_folders,
    to_json,
    write_synced,
)
from verl.checkpoint.find import REPLACED, TRACKER, list_checkpoints, step_folder
from verl.checkpoint.lock import RunLock
from verl.checkpoint.manifest import Manifest
from verl.checkpoint.part import DEFAULT_CONTENTS, HFWriter, check_contents, write_part
from verl.checkpoint.reader import TRAINER
from verl.checkpoint.retention import check_keep, clean, prune
from verl.checkpoint.state import EngineState
from verl.errors import CheckpointError
from verl.metrics import notice

WRITING = ".writing-"
PartWriter = Callable[[Path], "Mapping[str, FileRecord] | None"]
"""Writes a role's files into a folder (in a worker, say, by `write_part`); may return what `write_part` returns."""


class CheckpointWriter:
    """The checkpoints of one run folder; holds the folder's lock until `close`.

    Args:
        root: the run folder (``trainer.default_local_dir``).
        keep: role -> how many complete checkpoints stay (``trainer.max_actor_ckpt_to_keep``); None keeps all.
        background: `save` copies the engine states and returns; a thread writes them. Roles given as a `PartWriter` are
            still written before `save` returns. An error shows at the next `save`, `wait` or `close`.
        point: told the name of every point of a save that has been reached, for tests that kill there.

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
        background: bool = False,
        point: Callable[[str], None] = lambda name: None,
    ):
        self.root = Path(env.expand(str(root)))
        self.keep, self.background, self.point = dict(keep or {}), background, point
        check_keep(self.keep)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._buffers: dict[str, Tensor] = {}
        try:
            self.lock = RunLock(self.root)
            _recover(self.root)
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
    ) -> Path:
        """Save a step.

        Args:
            parts: role -> its state, or a function that writes it.
            hf: role -> writer of its Hugging Face folder.
            trainer_state: the controller's state, as JSON.
            contents: role -> of model, optimizer, extra, hf_model; all but the last by default.

        Returns:
            The step folder (with ``background``: where it will be).

        Raises:
            CheckpointError: the disk is full or read-only, or a state cannot be saved; earlier checkpoints are intact.
        """
        self.wait()
        for names in (contents or {}).values():
            check_contents(names)
        beside = self.root / f"{WRITING}global_step_{step}"
        records: dict[str, FileRecord] = {}
        states: dict[str, EngineState] = {}
        try:
            remove_tree(beside)
            beside.mkdir(parents=True)
            self.point("begin")
            write_synced(beside / TRAINER, to_json(trainer_state or {}, TRAINER))
            for part, source in parts.items():
                if isinstance(source, EngineState):
                    states[part] = self._snapshot(part, source) if self.background else source
                else:
                    records |= _under(part, source(beside / part))
        except BaseException as error:
            self._give_up(step, beside, error)
            raise

        def finish() -> None:
            self._finish(step, beside, states, records, tuple(parts), hf or {}, contents or {})

        if self.background:
            self._thread = threading.Thread(target=self._guarded, args=(finish,), name=f"checkpoint-{step}")
            self._thread.start()
        else:
            finish()
        return step_folder(self.root, step)

    def wait(self) -> None:
        """Wait for a save in the background; its error is raised here."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        """Finish what is being written and release the folder."""
        try:
            self.wait()
        finally:
            self.lock.release()

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _finish(
        self,
        step: int,
        beside: Path,
        states: Mapping[str, EngineState],
        records: dict[str, FileRecord],
        parts: tuple[str, ...],
        hf: Mapping[str, HFWriter],
        contents: Mapping[str, Sequence[str]],
    ) -> None:
        try:
            for part, state in states.items():
                wanted = contents.get(part, DEFAULT_CONTENTS)
                told = partial(self._part_point, part)
                records |= _under(part, write_part(beside / part, state, wanted, hf.get(part), told))
            sequence = 1 + max((c.manifest.sequence for c in list_checkpoints(self.root)), default=0)
            manifest = Manifest.of(beside, step, sequence, parts, records)
            self.point("files")
            sync_tree_folders(beside)
            manifest.write(beside)
            self.point("manifest")
            self._publish(step, beside)
        except BaseException as error:
            self._give_up(step, beside, error)
            raise
        self._after(step)

    def _part_point(self, part: str, name: str) -> None:
        self.point(f"{part}/{name}")

    def _publish(self, step: int, beside: Path) -> None:
        """Rename into place. An older save of the same step steps aside first, and is found there until then."""
        target = step_folder(self.root, step)
        aside = target.with_name(f"{REPLACED}{target.name}")
        if target.exists():
            remove_tree(aside)
            os.rename(target, aside)
            self.point("replaced")
        os.rename(beside, target)
        self.point("published")
        sync_folder(self.root)
        remove_tree(aside)

    def _after(self, step: int) -> None:
        """The checkpoint stands; what fails from here on is told and does not undo it."""
        try:
            replace_text(self.root / TRACKER, f"{step}\n")
            self.point("tracker")
            prune(self.root, self.keep, self.point)
        except OSError as error:
            notice(f"checkpoint {step}", f"it was saved, but the work after it failed: {error}")
        self.point("end")

    def _snapshot(self, part: str, state: EngineState) -> EngineState:
        """Copies of the tensors in memory that is reused from save to save (fresh memory is slow)."""
        copies: dict[str, Tensor] = {}
        for name, tensor in state.tensors.items():
            key = f"{part}:{name}"
            buffer = self._buffers.get(key)
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                buffer = self._buffers[key] = torch.empty_like(tensor, device="cpu")
            copies[name] = buffer.copy_(tensor.detach())
        return EngineState(copies, dict(state.scalars))

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # carried to the caller's thread, where `wait` raises it
            self._error = error

    def _give_up(self, step: int, beside: Path, error: BaseException) -> None:
        """Remove what was written, and tell an error of the disk in our own words."""
        try:
            remove_tree(beside)
        except OSError as second:
            notice(f"checkpoint {step}", f"{beside} could not be removed: {second}")
        if isinstance(error, OSError):
            intact = list_checkpoints(self.root)
            raise CheckpointError(
                f"step {step} could not be saved: {error}",
                key="trainer.default_local_dir",
                got=str(self.root),
                fix=f"The newest intact checkpoint is {intact[0].folder}."
                if intact
                else "There is no earlier checkpoint.",
            ) from error


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


def _under(part: str, records: Mapping[str, FileRecord] | None) -> dict[str, FileRecord]:
    return {f"{part}/{name}": record for name, record in (records or {}).items()}
