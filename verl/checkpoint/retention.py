"""Deleting old checkpoints: counted on the disk, so a restart forgets none, and never the newest one."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from verl.checkpoint.files import remove_tree
from verl.checkpoint.find import Checkpoint, list_checkpoints
from verl.errors import ConfigError
from verl.metrics import notice

DELETING = ".deleting-"


def check_keep(keep: Mapping[str, int | None]) -> None:
    """Raise `ConfigError` at a limit below one."""
    for part, count in keep.items():
        if count is not None and count < 1:
            raise ConfigError(
                "at least the newest checkpoint is kept", key=f"trainer.max_{part}_ckpt_to_keep", got=count
            )


def prune_checkpoints(
    root: Path,
    keep: Mapping[str, int | None],
    point: Callable[[str], None] = lambda name: None,
    needed: Callable[[Path], bool] = lambda folder: False,
) -> None:
    """Keep the newest ``keep[role]`` complete checkpoints of each role; None keeps all.

    A role is crossed out of the manifest before its files go, and a whole folder is renamed before it is deleted, so a
    kill in between leaves nothing that looks complete. What ``keep`` does not name (samples carried over, say) goes
    with the last role that it names. Damaged folders are neither counted nor deleted. A deletion that fails is reported
    once and retried after the next save; so is that of a folder that is still ``needed``.
    """
    seen: dict[str, int] = {}
    doomed: list[tuple[Checkpoint, set[str]]] = []
    for checkpoint in list_checkpoints(root):
        pruned = set(checkpoint.manifest.pruned)
        if not pruned and checkpoint.manifest.problem(checkpoint.folder, checksums=False):
            continue
        for part in checkpoint.manifest.parts:
            if part in pruned:
                continue
            seen[part] = seen.get(part, 0) + 1
            limit = keep.get(part)
            if limit is not None and seen[part] > limit:
                pruned.add(part)
        if pruned and not needed(checkpoint.folder):
            holding = (set(checkpoint.manifest.parts) & set(keep)) - pruned
            doomed.append((checkpoint, pruned if holding else set(checkpoint.manifest.parts)))
    for checkpoint, parts in reversed(doomed):  # the oldest first: a kill in between leaves the newer ones
        try:
            _delete(root, checkpoint, parts, point)
        except OSError as error:
            notice(f"checkpoint {checkpoint.folder}", f"it could not be deleted: {error}")


def delete(root: Path, folder: Path) -> None:
    """Delete a whole step folder; a kill in between leaves nothing that looks complete."""
    _vanish(root, folder, folder.name, lambda name: None)


def clean(root: Path) -> None:
    """Remove what deletions left behind when they were interrupted."""
    for leftover in root.glob(f"{DELETING}*"):
        remove_tree(leftover)


def _delete(root: Path, checkpoint: Checkpoint, parts: set[str], point: Callable[[str], None]) -> None:
    folder, manifest = checkpoint.folder, checkpoint.manifest
    if parts >= set(manifest.parts):
        _vanish(root, folder, folder.name, point)
        return
    for part in sorted(parts):
        if part not in manifest.pruned:
            manifest = manifest.without(part)
            manifest.write(folder)
            point("retention:manifest")
        if (folder / part).is_dir():
            _vanish(root, folder / part, f"{folder.name}-{part}", point)


def _vanish(root: Path, folder: Path, name: str, point: Callable[[str], None]) -> None:
    doomed = root / f"{DELETING}{name}"
    remove_tree(doomed)
    os.rename(folder, doomed)
    point("retention:renamed")
    remove_tree(doomed)
