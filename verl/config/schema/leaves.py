"""The tree of one configuration class, flat: every leaf and section under its dotted key, with what is known of it."""

from __future__ import annotations

import copy
import typing
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from verl.config.schema.tree import Node, leaves, to_dict
from verl.config.schema.upstream_only import rows


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
