"""Which checkpoint a run continues from."""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

from verl import env
from verl.checkpoint.manifest import MANIFEST, Manifest
from verl.errors import CheckpointError, ConfigError, suggest
from verl.metrics import notice

MODES = ("auto", "disable", "resume_path")
TRACKER = "latest_checkpointed_iteration.txt"
REPLACED = ".replaced-"
_STEP = re.compile(rf"^(?:{re.escape(REPLACED)})?global_step_(\d+)$")


@dataclass(frozen=True)
class Checkpoint:
    """A step folder that has a readable manifest.

    Args:
        folder: where it is.
        manifest: what it should consist of.
    """

    folder: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step


def step_folder(root: Path, step: int) -> Path:
    return root / f"global_step_{step}"


def list_checkpoints(root: str | Path) -> list[Checkpoint]:
    """All finished checkpoints of a run folder, the one saved last first; files are not looked at."""
    checkpoints = []
    for folder in _step_folders(Path(root)):
        if (folder / MANIFEST).is_file():
            try:
                checkpoints.append(Checkpoint(folder, Manifest.read(folder)))
            except CheckpointError as error:
                notice(f"checkpoint {folder}", error.message)
    return sorted(checkpoints, key=lambda c: -c.manifest.sequence)


def find_checkpoint(
    root: str | Path, mode: str = "auto", path: str | Path | None = None, skipped: Container[str] = ()
) -> Path | None:
    """The step folder to continue from.

    Args:
        root: the run folder (``trainer.default_local_dir``).
        mode: ``disable`` is None; ``resume_path`` is ``path``, which must be sound; ``auto`` is the checkpoint saved
            last among the sound ones, and those that are damaged or unfinished are named in a notice.
        skipped: labels (`Manifest.label`) of checkpoints that ``auto`` passes over, with a notice.

    Raises:
        CheckpointError: the named checkpoint is damaged, the chosen one holds files that it was not saved with, or the
            folder holds checkpoints of another program.
        ConfigError: unknown mode, or ``resume_path`` without a path.
    """
    if mode not in MODES:
        raise ConfigError(
            "unknown resume mode", key="trainer.resume_mode", got=mode, allowed=MODES, fix=suggest(mode, MODES)
        )
    if mode == "disable":
        return None
    if mode == "resume_path":
        return _named(path)
    return _newest_sound(Path(env.expand(str(root))), skipped)


def find_latest_ckpt_path(path: str | None, directory_format: str = "global_step_{}") -> str | None:
    """`find_checkpoint` under upstream's name; step folders have one name here."""
    newest = find_checkpoint(path) if path else None
    return None if newest is None else str(newest)


def _named(path: str | Path | None) -> Path:
    if not path:
        raise ConfigError(
            "resume_mode=resume_path needs a path", key="trainer.resume_from_path", fix="Name a global_step_N folder."
        )
    folder = Path(env.expand(str(path)))
    if not folder.is_dir():
        raise CheckpointError("there is no such folder", key="trainer.resume_from_path", got=str(path))
    _refuse_foreign(folder)
    inner = list_checkpoints(folder) if not (folder / MANIFEST).is_file() else []
    if inner:
        raise CheckpointError(
            "this folder holds checkpoints, it is none",
            key="trainer.resume_from_path",
            got=str(path),
            fix=f"Name one of them: {inner[0].folder}.",
        )
    manifest = Manifest.read(folder)
    problem = manifest.problem(folder)
    if problem:
        raise CheckpointError(
            f"this checkpoint cannot be used: {problem}", key="trainer.resume_from_path", got=str(path)
        )
    return _without_others(folder, manifest)


def _without_others(folder: Path, manifest: Manifest) -> Path:
    """Refuse files that nobody saved: passed over, they would send the run back to an older checkpoint."""
    others = manifest.unnamed(folder)
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        raise CheckpointError(
            f"the manifest of this checkpoint does not name {others[0]}{more}, so it is no part of it",
            got=str(folder),
            fix="Move it out of the folder.",
        )
    return folder


def _newest_sound(root: Path, skipped: Container[str]) -> Path | None:
    for folder in _step_folders(root):
        _refuse_foreign(folder)
        if not (folder / MANIFEST).is_file():
            notice(f"checkpoint {folder}", f"it has no {MANIFEST}, so it was never finished; it is not used")
    for checkpoint in list_checkpoints(root):
        if checkpoint.manifest.label in skipped:
            notice(
                f"checkpoint {checkpoint.folder}",
                "processes died at it, so it is passed over. To read it: trainer.resume_mode=resume_path "
                f"trainer.resume_from_path={checkpoint.folder}",
            )
            continue
        problem = checkpoint.manifest.problem(checkpoint.folder)
        if not problem:
            return _without_others(checkpoint.folder, checkpoint.manifest)
        notice(f"checkpoint {checkpoint.folder}", f"{problem}; it is not used")
    return None


def _step_folders(root: Path) -> list[Path]:
    """Step folders; one that was being replaced counts while its successor is not in place."""
    if not root.is_dir():
        return []
    folders = [p for p in sorted(root.iterdir()) if p.is_dir() and _STEP.match(p.name)]
    names = {p.name for p in folders}
    return [p for p in folders if not (p.name.startswith(REPLACED) and p.name.removeprefix(REPLACED) in names)]


def _refuse_foreign(folder: Path) -> None:
    cut = sorted(folder.glob("*/model_world_size_*_rank_*.pt"))
    pickled = sorted([*folder.glob("*/dist_ckpt"), *folder.glob("*/model/dist_ckpt")])
    if not (cut or pickled) or (folder / MANIFEST).is_file():
        return
    merge = f"python -m verl.model_merger merge --local_dir {(cut or pickled)[0].parent} --target_dir merged"
    if not cut:
        merge = "upstream's own merger with --backend megatron, where it was written (its index is a pickle)"
    raise CheckpointError(
        f"this is a checkpoint in upstream's format ({(cut or pickled)[0].relative_to(folder)})",
        got=str(folder),
        fix=f"Merge it to a Hugging Face folder and train that, by {merge}, or set another trainer.default_local_dir.",
    )
