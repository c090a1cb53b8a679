"""Copies of a run's checkpoints at a remote folder, made in the background and fetched where the local ones are gone.

The remote folder has the layout of the run's own. An object store renames nothing in one step, so the manifest goes
last: it names every file with size and checksum and has a checksum of itself, and a remote step folder without a sound
one is no checkpoint. A copy that was interrupted starts from scratch.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Container, Iterator
from pathlib import Path

from verl.checkpoint.deadly import pass_over, skipped_checkpoints
from verl.checkpoint.files import remove_tree, sync_file, sync_tree_folders, write_synced
from verl.checkpoint.find import TRACKER, find_checkpoint, list_checkpoints, step_folder
from verl.checkpoint.manifest import MANIFEST, Manifest
from verl.checkpoint.reader import TRAINER
from verl.checkpoint.writer import WRITING, put_in_place
from verl.config.schema.role import RunConfig
from verl.errors import CheckpointError, VerlError
from verl.metrics import notice
from verl.storage import remote_folder
from verl.storage.paths import ANSWER_SECONDS

KEY = "trainer.default_hdfs_dir"
PROBE, OWNER = ".writable", "run.txt"
"""A file that is written to see whether one may; the name of the run whose checkpoints are there."""
_STEP = re.compile(r"global_step_(\d+)")


class RemoteCheckpoints:
    """The complete checkpoints below a URL.

    Args:
        url: of the folder in which the step folders are (``trainer.default_hdfs_dir``).
        key: the setting that names it, for messages.
        run: the name of the one that copies its checkpoints there; no other one may.
        seconds: which one request may take; a file's copy may take longer by its size.

    Raises:
        CheckpointError: its kind of place is unknown, or a package or command for it is missing.
    """

    def __init__(self, url: str, key: str = KEY, run: str | None = None, seconds: float = ANSWER_SECONDS):
        self.key, self.run = key, run
        try:
            self.place = remote_folder(url, seconds)
        except VerlError as error:
            raise self._failure("cannot be used", error) from error

    @classmethod
    def of(cls, trainer: RunConfig) -> RemoteCheckpoints | None:
        """Those of a run with these settings; None: it copies its checkpoints nowhere."""
        if not trainer.default_hdfs_dir:
            return None
        run = f"{trainer.project_name}/{trainer.experiment_name}"
        return cls(
            trainer.default_hdfs_dir, run=None if trainer.save_freq in (-1, 0) else run, seconds=trainer.remote_timeout
        )

    def check(self) -> None:
        """Write and delete a small file, so that a run without access ends before it begins.

        Raises:
            CheckpointError: the place does not answer, or refuses, or has the checkpoints of another run.
        """
        try:
            self.place.put_text("", PROBE)
            self.place.remove(PROBE)
            owner = self._owner()
        except VerlError as error:
            raise self._failure("cannot be written", error) from error
        self._check_owner(owner)

    def _owner(self) -> str:
        """The run whose checkpoints are there; empty: none's."""
        return (self.place.read(OWNER) or "").strip()

    def _check_owner(self, owner: str) -> None:
        if self.run is None or owner in ("", self.run):
            return
        raise CheckpointError(
            f"the remote folder has the checkpoints of the run {owner!r}, and {self.run!r} would replace its steps",
            key=self.key,
            got=self.place.url,
            fix=f"Set {self.key}={self.place.url}/{self.run}. Is it the same run under another name? Then delete the "
            f"file {OWNER} there.",
        )

    def copy(self, folder: Path) -> None:
        """Copy a complete local checkpoint; nothing happens if it is there already.

        Raises:
            VerlError: the place does not answer, another run's checkpoints are there, or a file arrived with another
                size.
        """
        if self.run is not None:
            owner = self._owner()
            self._check_owner(owner)
            if not owner:
                self.place.put_text(f"{self.run}\n", OWNER)
        manifest, name = Manifest.read(folder), folder.name
        text = (folder / MANIFEST).read_text(encoding="utf-8")
        if self.place.read(f"{name}/{MANIFEST}") == text:
            return
        self.place.remove(f"{name}/{MANIFEST}")  # first: from here on there is no checkpoint of this step
        self.place.remove(name)
        for file in manifest.files:
            self.place.put(folder / file, f"{name}/{file}")
        sizes = self.place.sizes([f"{name}/{file}" for file in manifest.files])
        for (file, record), size in zip(manifest.files.items(), sizes, strict=True):
            if size != record.size:
                raise CheckpointError(f"{file} has {size} bytes there instead of {record.size}", got=self.place.url)
        self.place.put(folder / MANIFEST, f"{name}/{MANIFEST}")
        self.place.put_text(f"{manifest.step}\n", TRACKER)

    def newest_first(self) -> Iterator[Manifest]:
        """Manifests of what is complete there, the one copied last first; a damaged one is skipped, with a notice."""
        steps = [int(match[1]) for name in self.place.names() if (match := _STEP.fullmatch(name))]
        last = self.place.read(TRACKER) if steps else None
        for step in sorted(steps, key=lambda step: (str(step) == (last or "").strip(), step), reverse=True):
            name = f"global_step_{step}"
            text = self.place.read(f"{name}/{MANIFEST}")
            if text is None:
                notice(f"checkpoint {self.place.url}/{name}", "its copy was never finished; it is not used")
                continue
            try:
                yield Manifest.parsed(text, f"{self.place.url}/{name}")
            except CheckpointError as error:
                notice(f"checkpoint {self.place.url}/{name}", f"{error.message}; it is not used")

    def fetch(self, step: int, root: Path, replaces: bool = True) -> Path:
        """Copy a checkpoint into a run folder, where it appears complete or not at all; nothing happens if it is there.

        Args:
            replaces: a sound checkpoint of the same step that was saved there otherwise is replaced.

        Raises:
            CheckpointError: it is not there, a file is not what its manifest says, or it would replace another one.
            VerlError: the place does not answer.
        """
        name, staging = f"global_step_{step}", root / f"{WRITING}global_step_{step}"
        text = self.place.read(f"{name}/{MANIFEST}")
        if text is None:
            raise CheckpointError("there is no complete checkpoint", key=self.key, got=f"{self.place.url}/{name}")
        manifest, local = Manifest.parsed(text, f"{self.place.url}/{name}"), _sound(step_folder(root, step))
        if local == manifest:
            return step_folder(root, step)
        if local is not None and not replaces:
            raise CheckpointError(
                "this run's folder has another checkpoint of that step, which would be replaced",
                key=self.key,
                got=f"{self.place.url}/{name}",
                fix=f"Choose another trainer.default_local_dir, or move {step_folder(root, step)} away.",
            )
        notice(f"checkpoint {step_folder(root, step)}", f"it is copied from {self.place.url}/{name}")
        remove_tree(staging)
        staging.mkdir(parents=True)
        try:
            for file in manifest.files:
                self.place.get(f"{name}/{file}", staging / file)
                if "/" not in file and file != TRAINER:
                    (staging / file).chmod(0o600)  # the run's configuration is for its user only, as in the run folder
                sync_file(staging / file)
            write_synced(staging / MANIFEST, text)
            sync_tree_folders(staging)
            problem = manifest.problem(staging)
            if problem:
                raise CheckpointError(f"the copy is damaged: {problem}", key=self.key, got=f"{self.place.url}/{name}")
            return put_in_place(root, step, staging)
        finally:
            remove_tree(staging)

    def _failure(self, what: str, error: VerlError) -> CheckpointError:
        fix = error.fix or "Check the URL, the access rights of this process and the network, or leave the setting out."
        return CheckpointError(f"the remote folder {what}: {error.message}", key=self.key, got=error.got, fix=fix)


def _sound(folder: Path) -> Manifest | None:
    """The manifest of a checkpoint in this folder; None where there is none, or it cannot be used."""
    try:
        manifest = Manifest.read(folder)
    except CheckpointError:
        return None
    return None if manifest.problem(folder) else manifest


class BackgroundCopies:
    """Copies checkpoints one after the other in a thread; see `verl.checkpoint.writer.Copies`.

    A copy that fails gives a notice, and is tried again when the next checkpoint is complete and at the end of the run;
    its local folder stays until then.

    Args:
        remote: where to.
    """

    def __init__(self, remote: RemoteCheckpoints):
        self.remote = remote
        self.sequence = next((manifest.sequence for manifest in remote.newest_first()), 0)
        self._open: list[Path] = []
        self._failed: dict[Path, VerlError] = {}
        self._reading: Path | None = None
        # `_open`, `_failed` and `_reading` are shared by the run's threads and the one that copies; nobody holds the
        # lock while a file is copied.
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def catch_up(self, root: Path) -> None:
        """Copy what a killed run saved there and did not copy any more."""
        for checkpoint in reversed(list_checkpoints(root)):
            if not checkpoint.manifest.pruned:
                self.add(checkpoint.folder)

    def add(self, folder: Path) -> None:
        with self._changed:
            waiting = [*self._failed, *self._open, folder]
            self._failed.clear()
            self._open = list(dict.fromkeys(waiting))
            self._start()

    def needs(self, folder: Path) -> bool:
        with self._changed:
            return folder in self._open or folder in self._failed or folder == self._reading

    def finish(self, folder: Path) -> None:
        with self._changed:  # its successor takes the place of one that waits
            self._open = [other for other in self._open if other != folder]
            self._failed.pop(folder, None)
            self._changed.wait_for(lambda: self._reading != folder)

    def close(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._thread is None)
            self._open, self._failed = list(self._failed), {}
            self._start()
            self._changed.wait_for(lambda: self._thread is None)
            failed = dict(self._failed)
        if failed:
            folders = ", ".join(map(str, failed))
            raise CheckpointError(
                f"these checkpoints could not be copied and are in their local folders only: {folders}. The last "
                f"error: {list(failed.values())[-1]}",
                key=self.remote.key,
                got=self.remote.place.url,
                fix="Start the run again with the same settings: it copies what is missing.",
            )

    def _start(self) -> None:
        if self._thread is None and self._open:
            self._thread = threading.Thread(target=self._work, name="checkpoint-copies", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._open:
                    self._thread = self._reading = None
                    self._changed.notify_all()
                    return
                folder = self._reading = self._open.pop(0)
            error = self._attempt(folder)
            with self._changed:
                if error is not None:
                    self._failed[folder] = error
                self._reading = None
                self._changed.notify_all()

    def _attempt(self, folder: Path) -> VerlError | None:
        try:
            self.remote.copy(folder)
        except Exception as error:  # boundary: whatever it is, training continues and the copy is retried
            failure = error if isinstance(error, VerlError) else CheckpointError(f"{type(error).__name__}: {error}")
            notice(f"copy of {folder}", f"it failed and is tried again after the next save: {failure}")
            return failure
        return None


def find_or_fetch(
    root: str | Path, mode: str = "auto", path: str | Path | None = None, remote: RemoteCheckpoints | None = None
) -> Path | None:
    """As `find_checkpoint`; with ``auto`` a newer complete checkpoint at the remote folder is fetched first.

    With ``auto`` a checkpoint at which process after process died is passed over (`verl.checkpoint.deadly`).

    ``resume_path`` may be a URL, whose checkpoint is fetched, too; it never replaces one that the run has saved itself.
    The number of the save (``sequence``) says which of two is newer; a run that was fetched continues the count.
    """
    folder = Path(root)
    if mode == "resume_path" and path and "://" in str(path):
        parent, _, name = str(path).rstrip("/").rpartition("/")
        match = _STEP.fullmatch(name)
        if match is None:
            raise CheckpointError(
                "a remote checkpoint is named by its step folder", key="trainer.resume_from_path", got=str(path),
                allowed=".../global_step_N",
            )  # fmt: skip
        return RemoteCheckpoints(parent, "trainer.resume_from_path").fetch(int(match[1]), folder, replaces=False)
    if mode != "auto":
        return find_checkpoint(folder, mode, path)
    skipped = skipped_checkpoints(folder)
    newest = _newest(folder, remote, skipped)
    if newest is not None and skipped:
        pass_over(folder, skipped)
    elif skipped and (newest := _newest(folder, remote, ())) is not None:
        notice(f"checkpoint {newest.name}", "processes died at it; it is read again, because there is no other one")
    return newest


def _newest(root: Path, remote: RemoteCheckpoints | None, skipped: Container[str]) -> Path | None:
    """The newest sound checkpoint of a run folder and its copies, which is fetched."""
    newest = find_checkpoint(root, skipped=skipped)
    if remote is None:
        return newest
    here = -1 if newest is None else Manifest.read(newest).sequence
    for manifest in remote.newest_first():
        if manifest.sequence <= here:
            break
        if manifest.label in skipped:
            continue
        try:
            return remote.fetch(manifest.step, root)
        except CheckpointError as error:  # it is damaged; a place that does not answer ends the run
            notice(f"checkpoint {remote.place.url}/global_step_{manifest.step}", f"{error}; it is not used")
    return newest
