"""Runs attempts of hostile code in a sandbox, and tells which of them got through."""

from __future__ import annotations

import json
import os
import textwrap
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.sandbox import Limits, Outcome, Pool

_AROUND = """
import json
_results = {}
def _attempt(name, code):
    try:
        space = {"__name__": "attempt"}
        exec(code, space)
        _results[name] = "through: " + repr(space.get("got"))[:200]
    except BaseException as error:
        _results[name] = type(error).__name__
for _name, _code in json.loads(ATTEMPTS).items():
    _attempt(_name, _code)
print("RESULTS" + json.dumps(_results))
"""


@dataclass(frozen=True)
class Box:
    """A sandbox, and the layers that it does without."""

    pool: Pool
    missing: tuple[str, ...]
    arguments: Mapping[str, Any]
    """Of another pool like this one."""

    def run(self, code: str, stdin: str = "", **limits: float) -> Outcome:
        return self.pool.run(textwrap.dedent(code), stdin, Limits(**limits))  # type: ignore[arg-type]

    def attempts(self, tries: Mapping[str, str], **limits: float) -> dict[str, str]:
        """What became of each attempt: the name of the exception that stopped it, or ``through: <its got>``."""
        cleaned = {name: textwrap.dedent(code) for name, code in tries.items()}
        code = f"ATTEMPTS = {json.dumps(cleaned)!r}\n{_AROUND}"
        outcome = self.pool.run(code, limits=Limits(**limits))  # type: ignore[arg-type]
        assert "RESULTS" in outcome.stdout, outcome
        return json.loads(outcome.stdout.rpartition("RESULTS")[2])

    def none_gets_through(self, tries: Mapping[str, str], **limits: float) -> None:
        found = self.attempts(tries, **limits)
        assert found.keys() == tries.keys()
        through = {name: said for name, said in found.items() if said.startswith("through")}
        assert not through, through


def descendants(pid: int) -> set[int]:
    """All processes below this one."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parents[int(folder.name)] = int(folder.joinpath("stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        parent = waiting.pop()
        children = {child for child, above in parents.items() if above == parent} - found
        found |= children
        waiting += children
    return found


def keeper_processes(pool: Pool) -> set[int]:
    """The processes of a pool: two of its own, and those of its runs."""
    watcher = pool._keepers[-1].pid
    return {watcher, *descendants(watcher)}


def wait_until_quiet(pool: Pool, most: int = 2, seconds: float = 60.0) -> set[int]:
    """The pool's processes, once there are no more than those of its own or the time is over."""
    deadline = time.monotonic() + seconds
    while len(found := keeper_processes(pool)) > most and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that waits to be buried does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def all_end(pids: set[int], seconds: float = 60.0) -> bool:
    """Whether processes end, however busy the machine is."""
    deadline = time.monotonic() + seconds
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(is_alive, pids))


def own_cores() -> int:
    return len(os.sched_getaffinity(0))
