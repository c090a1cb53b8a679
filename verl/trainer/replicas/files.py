"""The two files in a run's folder by which its replicas are seen and changed from outside: plain JSON.

``replicas.json`` is the run's and says which replicas there are. ``replicas_wanted.json`` is the user's; the run looks
for it once in a while and removes it when it has read it. Who may write into the folder may change the number.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from verl.errors import ConfigError
from verl.json_text import read_json

SEEN, WANTED = "replicas.json", "replicas_wanted.json"
MOST = 4096
"""Replicas that can be asked for: more is a typing error."""


def write_seen(folder: Path, seen: Mapping[str, Any]) -> None:
    """Say which replicas there are; whoever reads it sees this or what was there before."""
    _write(folder / SEEN, seen)


def read_seen(folder: Path) -> dict[str, Any]:
    """What the run of a folder said last.

    Raises:
        ConfigError: no run whose replicas come and go is under way there.
    """
    with suppress(OSError):
        text = (folder / SEEN).read_text(encoding="utf-8", errors="replace")
        seen = _seen_in(text)
        if seen is None:
            raise ConfigError(f"{SEEN} holds something else than a run writes", got=text[:100], fix="Remove the file.")
        if seen["node"] != os.uname().nodename or Path(f"/proc/{seen['controller']}").exists():
            return seen
    raise ConfigError(
        "no run is under way here whose replicas come and go",
        got=str(folder),
        fix="Name the folder trainer.default_local_dir of a run with actor_rollout_ref.rollout.max_replacements=1 or "
        "more and a pool of its own for the samplers.",
    )


def _seen_in(text: str) -> dict[str, Any] | None:
    try:
        seen = read_json(text)
        facts = {"controller", "node", "replicas", "replaced", "allowed", "said"} <= seen.keys()
        known = facts and all({"name", "state", "processes", "node"} <= one.keys() for one in seen["replicas"])
        return seen if known and type(seen["controller"]) is int else None
    except (ValueError, TypeError, AttributeError):
        return None


def want(folder: Path, count: int) -> None:
    """Ask the run of a folder for so many replicas.

    Raises:
        ConfigError: it is no possible number.
    """
    if not 1 <= count <= MOST:
        raise ConfigError("no number of replicas", key="--count", got=count, allowed=f"1 to {MOST}")
    _write(folder / WANTED, {"count": count})


def take_wanted(folder: Path) -> int | None:
    """The number that was asked for since the last call, and None if none was.

    Raises:
        ConfigError: the file holds something else.
    """
    place = folder / WANTED
    try:
        text = place.read_text(encoding="utf-8")
    except OSError:
        return None
    with suppress(OSError):
        place.unlink()
    try:
        count = read_json(text)["count"]
        if type(count) is int and 1 <= count <= MOST:
            return count
    except (ValueError, KeyError, TypeError):
        pass
    raise ConfigError(f"{WANTED} holds no number of replicas", got=text[:100], allowed='{"count": 3}')


def forget(folder: Path) -> None:
    """The run is over, or begins: nothing is said and nothing wanted."""
    for name in (SEEN, WANTED):
        with suppress(OSError):
            (folder / name).unlink()


def _write(place: Path, content: Mapping[str, Any]) -> None:
    beside = place.with_suffix(".new")
    beside.write_text(json.dumps(content), encoding="utf-8")
    os.replace(beside, place)
