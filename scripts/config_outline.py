"""The trees of all programs in parts that can be read one by one: each section once, with all places it occurs at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field
from typing import Any

from verl.config.loading.groups import PPO, SFT, Program
from verl.config.schema.node import ConfigNode

SMALL = 4
"""A sub-section of at most that many settings that occurs nowhere else is listed with the section around it."""


@dataclass(frozen=True)
class OutlinePlace:
    """One occurrence of a section: its key in a program, the defaults that differ and the settings that follow there.

    ``owner`` is the class that declares it, and the name it has there.
    """

    program: Program
    key: str
    owner: tuple[type, str]
    defaults: Mapping[str, Any]
    follows: Mapping[str, str]

    def leaf(self, name: str) -> str:
        """The full key of a setting of this section."""
        return f"{self.key}.{name}"


@dataclass
class OutlinePart:
    """A section with its settings, those of small sub-sections included.

    Attributes:
        places: every occurrence, in order.
        base: the part whose settings this one has as well, where its class is derived from that one's.
        rows: the settings that are declared here, by their names inside the section.
    """

    cls: type[ConfigNode]
    places: list[OutlinePlace] = field(default_factory=list)
    base: OutlinePart | None = None
    rows: dict[str, Field[Any]] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """The key of its first place."""
        return self.places[0].key

    @property
    def distinct_places(self) -> list[OutlinePlace]:
        """One place per class that declares the section: what a repeated section repeats is left out."""
        return list({place.owner: place for place in reversed(self.places)}.values())[::-1]


def parts() -> list[OutlinePart]:
    """Every part of all programs, in order of declaration; RL runs first."""
    by_class: dict[type[ConfigNode], OutlinePart] = {}
    for program in (PPO, SFT):
        for cls, place in _sections(program, program.root, ""):
            by_class.setdefault(cls, OutlinePart(cls)).places.append(place)
    small = {cls for cls, part in by_class.items() if _is_small(part)}
    for cls, part in by_class.items():
        part.base = next((by_class[base] for base in cls.__mro__[1:] if base in by_class), None)
        inherited = part.base.cls.__dataclass_fields__ if part.base else {}
        part.rows = {name: row for name, row in _rows(cls, small) if _is_own(cls, name.partition(".")[0], inherited)}
    return [part for cls, part in by_class.items() if cls not in small and part.rows]


def _sections(program: Program, cls: type[ConfigNode], key: str) -> Iterator[tuple[type[ConfigNode], OutlinePlace]]:
    for name, declared in cls.__dataclass_fields__.items():
        inner = declared.metadata.get("section")
        if inner is None:
            continue
        own = f"{key}.{name}".removeprefix(".")
        meta = declared.metadata
        yield inner, OutlinePlace(program, own, (_declaring(cls, name), name), meta["defaults"], meta["follows"])
        yield from _sections(program, inner, own)


def _is_own(cls: type[ConfigNode], name: str, inherited: Mapping[str, Any]) -> bool:
    return name not in inherited or _declaring(cls, name) is cls


def _declaring(cls: type[ConfigNode], name: str) -> type:
    """The class in whose body a field stands."""
    return next(base for base in cls.__mro__ if name in vars(base).get("__annotations__", {}))


def _is_small(part: OutlinePart) -> bool:
    fields = part.cls.__dataclass_fields__.values()
    nests = any(row.metadata.get("section") is not None for row in fields)
    owners = {place.owner[0] for place in part.places}
    return (
        not nests and len(fields) <= SMALL and len(owners) == 1 and not owners & {*PPO.root.__mro__, *SFT.root.__mro__}
    )


def _rows(cls: type[ConfigNode], small: set[type[ConfigNode]], prefix: str = "") -> Iterator[tuple[str, Field[Any]]]:
    for name, row in cls.__dataclass_fields__.items():
        inner = row.metadata.get("section")
        if inner is None:
            yield f"{prefix}{name}", row
        elif inner in small:
            yield from _rows(inner, small, f"{prefix}{name}.")
