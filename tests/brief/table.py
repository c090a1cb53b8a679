"""What public guides to verl say, row by row, and how each row is looked after here; the rows lie in ``rows/*.toml``.

A row has, as it needs: commands and files with their settings (``config``), modules that are run (``programs``),
public names (``names``), files of the repository, sentences of the documentation, extras, variables that reach the
workers, and the tests that show it at work. Nothing in a row says whether its feature exists: that is found out.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tests.sanity.source_tree import read_toml

ROWS = Path(__file__).parent / "rows"


@dataclass(frozen=True)
class Attempt:
    """One command, or one file and a command, as guides print it.

    Args:
        argv: the words after the program; ``yaml`` is what ``config/mine.yaml`` holds.
        values: settings of the result, by dotted key, that must hold once the configuration is accepted.
        notices: keys of notices that must be told then.
        wrong: a part of the error, for what is meant to be refused for good.
        runs: it is also run on a tiny model, in one process with the built-in sampler, once it is accepted.
        ranks: it is run on a tiny model with as many processes as it prints.
    """

    argv: str
    program: str = "ppo_trainer"
    yaml: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    notices: tuple[str, ...] = ()
    wrong: str = ""
    runs: bool = False
    ranks: bool = False

    @property
    def words(self) -> list[str]:
        return shlex.split(self.argv)


@dataclass(frozen=True)
class Row:
    """One fact that a guide states.

    Args:
        instead: what tests of its files run in place of what is printed, where they do not run that.
        hardware: page and words that say what of it was run on the hardware that it is meant for.
    """

    id: int
    section: str
    says: str
    config: tuple[Attempt, ...] = ()
    programs: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    docs: tuple[tuple[str, str], ...] = ()
    tests: tuple[str, ...] = ()
    extras: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    instead: str = ""
    hardware: tuple[tuple[str, str], ...] = ()


@cache
def rows() -> tuple[Row, ...]:
    """All rows, in the order of the guides' facts."""
    return tuple(row for file in sorted(ROWS.glob("*.toml")) for row in _section(read_toml(file)))


def _section(page: dict[str, Any]) -> list[Row]:
    found = []
    for entry in page["row"]:
        attempts = tuple(Attempt(**_frozen(attempt)) for attempt in entry.pop("config", ()))
        found.append(Row(section=page["title"], config=attempts, **_frozen(entry)))
    return found


def _frozen(entry: dict[str, Any]) -> dict[str, Any]:
    """Lists as tuples, so that a row can be a key; values of settings stay as they are."""
    return {key: _tuple(value) if isinstance(value, list) else value for key, value in entry.items()}


def _tuple(value: Any) -> Any:
    return tuple(map(_tuple, value)) if isinstance(value, list) else value
