"""Settings of upstream's tree that nothing here follows: ``upstream_only.yaml`` in this folder, read once.

They are data and no declarations, since no code reads them: a script that carries them with their defaults runs, and any
other value is refused by the name of the feature that is missing, or has no effect, with a notice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("upstream_only.yaml")


@dataclass(frozen=True)
class UpstreamRow:
    """One setting of a section class: dotted name below the section, upstream's default, and what becomes of it.

    Exactly one of ``feature`` (any value but the default is refused by this name) and ``no_effect`` (why) is set. With
    ``is_open`` it is a mapping that takes any names. Below a ``switch`` that is off nothing is refused, since the
    switch alone decides.
    """

    name: str
    default: Any
    follows: str | None
    feature: str | None
    no_effect: str | None
    is_open: bool = False


@cache
def rows() -> dict[str, tuple[UpstreamRow, ...]]:
    """Name of a section class -> its rows, in the order of the file."""
    import yaml

    by_section: dict[str, list[UpstreamRow]] = {}
    for block in yaml.load(FILE.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        for section in block["sections"]:
            by_section.setdefault(section, []).extend(_rows(block))
    return {section: tuple(entries) for section, entries in by_section.items()}


def names_of(section: type) -> list[str]:
    """The names directly in a section class: those that are declared, then upstream's only."""
    upstream = [row.name.partition(".")[0] for cls in section.__mro__ for row in rows().get(cls.__name__, ())]
    return list(dict.fromkeys([*section.__dataclass_fields__, *upstream]))  # type: ignore[attr-defined]


def _rows(block: dict[str, Any]) -> Iterator[UpstreamRow]:
    for name, default in block["defaults"].items():
        follows = None
        if isinstance(default, dict) and "follows" in default:
            follows, default = default["follows"], default["default"]
        feature, no_effect = block.get("feature"), block.get("no_effect")
        switch = block.get("switch")
        if switch is not None and name != switch:
            feature, no_effect = None, f"it belongs to {block['feature']}, which {switch} switches on"
        yield UpstreamRow(name, default, follows, feature, no_effect, name in block.get("open", ()))
