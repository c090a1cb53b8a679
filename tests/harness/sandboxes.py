"""The ways in which the sandbox can be used on this machine: with all its walls, and with each one missing.

``TEST_SANDBOX_LANDLOCK=3`` runs the tests as on a kernel with that version of Landlock, and
``TEST_SANDBOX_WITHOUT=seccomp`` as on one without that layer (scripts/sandbox_guarantees.py).
"""

from __future__ import annotations

import os
from typing import Any

from verl.sandbox import LAYERS, Pool, SandboxRefused
from verl.sandbox.kernel.landlock import NEWEST

NEWEST_LANDLOCK = int(os.environ.get("TEST_SANDBOX_LANDLOCK", NEWEST))
"""The version of Landlock of an older kernel, for which this one is to be taken; 0: of one that has none."""
_GONE = (*(() if NEWEST_LANDLOCK else ("landlock",)), *os.environ.get("TEST_SANDBOX_WITHOUT", "").split())
MODES: dict[str, tuple[str, ...]] = {"whole": _GONE, **{f"without {layer}": tuple({*_GONE, layer}) for layer in LAYERS}}


def open_pool(mode: str, size: int | None = None) -> Pool:
    """A pool in this mode; without layers, they are left out even where the machine has them."""
    return Pool(size, **arguments(mode))


def arguments(mode: str) -> dict[str, Any]:
    return {"allow_missing": MODES[mode], "without": MODES[mode], "newest_landlock": NEWEST_LANDLOCK}


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
HERE: dict[str, Any] = arguments(OFFERED[0]) if OFFERED else {}
"""Arguments of a pool with all that this machine offers."""
