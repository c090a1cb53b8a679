"""The ways in which the sandbox can be used on this machine: with all its walls, and with each one missing."""

from __future__ import annotations

from verl.sandbox import LAYERS, Pool, SandboxRefused

MODES: dict[str, tuple[str, ...]] = {"whole": (), **{f"without {layer}": (layer,) for layer in LAYERS}}


def open_pool(mode: str, size: int | None = None) -> Pool:
    """A pool in this mode; without layers, they are left out even where the machine has them."""
    return Pool(size, allow_missing=MODES[mode], without=MODES[mode])


def offered_modes() -> list[str]:
    """The modes that this machine can run."""
    found = []
    for mode in MODES:
        with open_pool(mode) as pool:
            try:
                pool.prepare()
            except SandboxRefused:
                continue
        found.append(mode)
    return found


OFFERED = offered_modes()
HERE: dict[str, tuple[str, ...]] = {"allow_missing": MODES[OFFERED[0]], "without": MODES[OFFERED[0]]} if OFFERED else {}
"""Arguments of a pool with all that this machine offers."""
