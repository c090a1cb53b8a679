"""The tree of one configuration class, flat: every leaf and section under its dotted key, with what is known of it.

Settings of upstream's tree that nothing here follows are ``upstream_only.yaml`` in this folder. They are data and no
declarations, since no code reads them: a script that carries them with their defaults runs, and any other value is refused
by the name of the feature that is missing, or has no effect, with a notice.
"""

from __future__ import annotations

import copy
import difflib
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from verl.config.schema.tree import Node, leaves, to_dict

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


@dataclass(frozen=True)
class Leaf:
    """One setting as it is declared; ``follows`` is absolute, and null where the followed key is not in this tree."""

    key: str
    type: Any
    default: Any
    meaning: str
    choices: tuple[Any, ...] | None
    planned: str | None
    no_effect: str | None
    engines: tuple[str, ...]
    follows: str | None
    path: bool
    within: tuple[Any, ...] = ()
    needs: str | None = None


@dataclass(frozen=True)
class Schema:
    """All leaves and sections of a root class.

    Attributes:
        leaves: the declared settings.
        sections: the declared sections.
        upstream_only: settings of upstream's tree that nothing follows; a section may have none but these.

    Example:
        >>> schema_of(PPOTrainerConfig).leaves["trainer.total_epochs"].default
        30
    """

    root: type[Node]
    leaves: dict[str, Leaf] = field(repr=False)
    sections: dict[str, type[Node]] = field(repr=False)
    upstream_only: dict[str, Leaf] = field(repr=False)

    @cached_property
    def every(self) -> dict[str, Leaf]:
        """Every key that is known, the declared ones first."""
        return {**self.leaves, **self.upstream_only}

    @cached_property
    def _upstream_sections(self) -> frozenset[str]:
        parts = [key.split(".") for key in self.upstream_only]
        return frozenset(".".join(names[:n]) for names in parts for n in range(1, len(names)))

    def is_section(self, key: str) -> bool:
        """Whether settings stand below this key, be they declared or upstream's only."""
        return key in self.sections or key in self._upstream_sections

    def names_in(self, section: str) -> list[str]:
        """The names directly below a section."""
        start = f"{section}."
        return list(dict.fromkeys(key[len(start) :].partition(".")[0] for key in self.every if key.startswith(start)))

    def split(self, key: str) -> tuple[Leaf, str] | None:
        """The leaf a key names and the path inside it (``override_config`` and ``a.b``); None if there is no such leaf."""
        if key in self.every:
            return self.every[key], ""
        parts = key.split(".")
        for cut in range(len(parts) - 1, 0, -1):
            leaf = self.every.get(".".join(parts[:cut]))
            if leaf is not None:
                return (leaf, ".".join(parts[cut:])) if holds_mapping(leaf.type) else None
        return None


def holds_mapping(annotation: Any) -> bool:
    """Whether a leaf of this type may hold a mapping, so that keys may reach into it."""
    return annotation is dict or dict in typing.get_args(annotation)


_made: dict[type[Node], Schema] = {}


def schema_of(root: type[Node]) -> Schema:
    """The flat tree of a root class, made once."""
    if root not in _made:
        _made[root] = _make(root)
    return _made[root]


def _make(root: type[Node]) -> Schema:
    defaults = to_dict(root())
    sections: dict[str, type[Node]] = {}
    types: dict[str, Any] = {}
    there: dict[str, str] = {}
    switches: dict[str, str] = {}
    _walk(root, "", sections, types, there, switches)
    by_key = {}
    for key, declared in leaves(root):
        meta, value = declared.metadata, defaults
        for part in key.split("."):
            value = value[part]
        follows = there.get(key) or _absolute(meta["follows"], key)
        by_key[key] = Leaf(
            key,
            types[key],
            value,
            meta["meaning"],
            meta["choices"],
            meta["planned"],
            meta["no_effect"],
            meta["engines"],
            follows if follows in types else None,
            meta["path"],
            meta["within"],
            _absolute(meta["needs"], key) or switches.get(key),
        )
    below = {
        f"{key}.{row.name}".removeprefix("."): row
        for key, section in {"": root, **sections}.items()
        for cls in reversed(section.__mro__)
        for row in rows().get(cls.__name__, ())
    }
    upstream_only: dict[str, Leaf] = {}
    for key, row in below.items():
        follows = _absolute(row.follows, key)
        follows = follows if follows in types or follows in below else None
        is_path = follows in by_key and by_key[follows].path
        annotation: Any = Any if row.default is None or row.no_effect else type(row.default)
        annotation = dict | None if row.is_open or isinstance(row.default, dict) else annotation
        default = copy.deepcopy(row.default)
        upstream_only[key] = Leaf(key, annotation, default, "", None, row.feature, row.no_effect, (), follows, is_path)
    return Schema(root, by_key, sections, upstream_only)


def _walk(
    cls: type[Node],
    prefix: str,
    sections: dict[str, type[Node]],
    types: dict[str, Any],
    there: dict[str, str],
    switches: dict[str, str],
) -> None:
    """Fill in the class of every section, the type of every leaf, and what leaves follow and need where they stand."""
    hints = typing.get_type_hints(cls)
    for name, declared in cls.__dataclass_fields__.items():
        key = f"{prefix}.{name}".removeprefix(".")
        inner = declared.metadata.get("section")
        if inner is None:
            types[key] = hints[name]
        else:
            sections[key] = inner
            there |= {f"{key}.{leaf}": other for leaf, other in declared.metadata["follows"].items()}
            switch = _absolute(declared.metadata["needs"], f"{key}.")
            if switch is not None:
                names = (f"{key}.{name}" for name in inner.__dataclass_fields__)
                switches |= {leaf: switch for leaf in names if leaf != switch.partition("=")[0]}
            _walk(inner, key, sections, types, there, switches)


def _absolute(follows: str | None, key: str) -> str | None:
    """A leading dot is the section of the key itself, each further one the section around it."""
    if follows is None or not follows.startswith("."):
        return follows
    name = follows.lstrip(".")
    sections = key.split(".")[: -(len(follows) - len(name))]
    return ".".join([*sections, name])


_NEAR = 0.75
_OPEN = ("override_", "engine_kwargs.")
"""How names of mappings begin that hand their fields on to a model's or an engine's own configuration."""


def nearest(schema: Schema, key: str, limit: int = 3) -> list[str]:
    """Full keys that were probably meant: a misspelt sibling, a shortened key, the same name elsewhere, or none."""
    section, _, name = key.rpartition(".")
    built = [k for k, leaf in schema.every.items() if leaf.planned is None or leaf.engines]
    siblings = {k.rpartition(".")[2]: k for k in built if k.rpartition(".")[0] == section}
    near = [siblings[n] for n in difflib.get_close_matches(name, siblings, n=limit, cutoff=0.7)]
    near += [k for k in built if k.endswith(f".{key}")]
    near += _of_one_role(key, [k for k in built if k.rpartition(".")[2] == name])
    near = near or [k for k in built if _alike(key.split("."), k.split("."))]
    return list(dict.fromkeys(near))[:limit]


def open_key(schema: Schema, key: str) -> str | None:
    """The mapping of the section, or of the one around it, that takes a field which the section does not have."""
    parts = key.split(".")
    for cut in (len(parts) - 1, len(parts) - 2):
        start = ".".join(parts[:cut]) + "."
        takes = [k for k, leaf in schema.leaves.items() if k.startswith(start) and holds_mapping(leaf.type)]
        takes = [k for k in takes if k[len(start) :].startswith(_OPEN) and k.count(".") <= start.count(".") + 1]
        if takes and cut >= 2:
            return takes[0]
    return None


def _of_one_role(key: str, same_name: list[str]) -> list[str]:
    """The nearest first; where some are of the same role as the key, these alone."""
    ordered = sorted(same_name, key=lambda k: -difflib.SequenceMatcher(None, key, k).ratio())
    role = key.split(".")[:2]
    return [k for k in ordered if k.split(".")[:2] == role] or ordered


def _alike(parts: list[str], candidates: list[str]) -> bool:
    """Every part is the other's, or nearly."""
    return len(parts) == len(candidates) and all(
        a == b or difflib.SequenceMatcher(None, a, b).ratio() >= _NEAR for a, b in zip(parts, candidates)
    )
