"""How long a run is to be and how it ended, in a small file of its folder, for those who look at the run.

A process that dies without a word leaves the state ``running`` behind; its number and the moment it began tell whether
it is alive.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from verl.errors import hide_in_text
from verl.json_text import JsonObject, object_of
from verl.metrics import notice
from verl.outcomes import on_error

NAME = "state.json"
LONGEST = 2000
"""Characters of the reason that are kept."""
MOST_READ = 16 * LONGEST
"""Characters that are read: JSON escapes one of the reason as up to 12."""
SIGNALED = 128
"""The exit status after a signal is this, and its number."""


@contextmanager
def recorded_end(folder: Path, total_steps: int) -> Iterator[None]:
    """Note that the run continues, and at the end of the block how it ended: complete, stopped or failed.

    Args:
        folder: the run's.
        total_steps: after which it is complete.
    """
    with on_error(lambda error: _write(folder, total_steps, *_how(error))):
        _write(folder, total_steps, "running", "")
        yield
    _write(folder, total_steps, "complete", "")


def read_end(folder: Path) -> JsonObject:
    """``state``, ``why``, ``total_steps``, ``pid``, ``host`` and ``began`` as the run noted them; empty: it did not."""
    with suppress(OSError):  # a run of an earlier release
        with (folder / NAME).open(encoding="utf-8", errors="replace") as file:
            noted = object_of(file.read(MOST_READ))
        return noted if isinstance(noted, dict) else {}
    return {}


def is_alive(noted: JsonObject) -> bool | None:
    """Whether the process that noted something runs now; None: it was on another machine."""
    if noted.get("host") != socket.gethostname():
        return None
    try:
        began = psutil.Process(int(noted["pid"])).create_time()
        return abs(began - float(noted.get("began") or 0.0)) < 1.0
    except (psutil.Error, KeyError, TypeError, ValueError, OverflowError):
        return False


def _how(error: BaseException) -> tuple[str, str]:
    """A signal ends a run in order by an exit, or by Ctrl-C at once; any other exit is a failure."""
    code = error.code if isinstance(error, SystemExit) else None
    if (isinstance(code, int) and code >= SIGNALED) or type(error) is KeyboardInterrupt:
        return "stopped", getattr(error, "sentence", "") or "it was interrupted"
    return "failed", f"{type(error).__name__}: {error}"


def _write(folder: Path, total_steps: int, state: str, why: str) -> None:
    process = psutil.Process()
    noted = {
        "state": state, "why": hide_in_text(why)[:LONGEST], "total_steps": total_steps, "pid": process.pid,
        "host": socket.gethostname(), "began": process.create_time(),
    }  # fmt: skip
    part = folder / f"{NAME}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(noted, indent=1) + "\n", encoding="utf-8")
        os.replace(part, folder / NAME)
    except OSError as error:
        notice(f"{NAME} in trainer.default_local_dir", f"the state of the run is not noted: {error}")
