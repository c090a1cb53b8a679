"""What every section of the configuration is: a frozen dataclass that takes mappings for the sections in it.

YAML and shells lose types: ``1e-6`` may arrive as a text, ``3`` as a float, a single file where a list is meant. What
can only mean one thing is converted; everything else is refused. How settings are declared, read and compared is in
`verl.config.schema.tree`.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TypeVar

from verl import env
from verl.config.schema.tree import (
    ABSENT,
    UNSET,
    Node,
    changed_names,
    follows_another,
    full_keys,
    key_of,
    leaves,
    place,
    record_reads,
    replace,
    section,
    setting,
    to_dict,
    unread,
    unrecorded,
    was_typed,
)
from verl.errors import ConfigError, NotBuiltError
from verl.metrics import notice

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
        for name in block["sections"]:
            by_section.setdefault(name, []).extend(_rows(block))
    return {name: tuple(entries) for name, entries in by_section.items()}


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


def holds_mapping(annotation: object) -> bool:
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


_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", list: "a list"}
_YES, _NO = ("true", "yes", "on"), ("false", "no", "off")
_LIST = re.compile(r"\[[^\[\]{}]*\]$")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$|[+-]?inf$")


def convert(value: object, annotation: object) -> Any:
    """``value`` as an ``annotation``; raises TypeError if it cannot mean that."""
    if annotation is Any:
        return value
    options = _options(annotation)
    if type(None) in options:
        if value is None or value in ("None", "none", "null"):
            return None
        options = tuple(option for option in options if option is not type(None))
    exact = [option for option in options if type(value) is (typing.get_origin(option) or option)]
    for option in [*exact, *options]:
        try:
            return _one(value, option)
        except TypeError:
            continue
    raise TypeError(describe(annotation))


def describe(annotation: object) -> str:
    """What a person may write for this type."""
    names = []
    for option in _options(annotation):
        base = typing.get_origin(option) or option
        names.append("null" if base is type(None) else _WORDS.get(base, "a mapping"))
    return " or ".join(names)


def expand_path(value: object, key: str) -> Any:
    """``~`` and ``$VARIABLES`` in a path or a list of paths; a variable that is not set is an error."""
    if isinstance(value, list):
        return [expand_path(item, key) for item in value]
    if not isinstance(value, str):
        return value
    expanded = env.expand(value)
    missing = re.search(r"\$\{?(\w+)", expanded)
    if missing:
        raise ConfigError(
            f"the environment variable {missing[1]} is not set",
            key=key,
            got=value,
            fix="Set it, or write out the path.",
        )
    return expanded


def build(cls: type[Node], values: dict[str, Any], prefix: str = "") -> Any:
    """A node of ``cls`` from the value of every leaf below it, by dotted key; values are of the declared types."""
    made = {}
    for name, declared in cls.__dataclass_fields__.items():
        key = f"{prefix}.{name}".removeprefix(".")
        inner = declared.metadata.get("section")
        made[name] = copy.deepcopy(values[key]) if inner is None else build(inner, values, key)
    return cls(**made)


def _options(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def _one(value: Any, annotation: Any) -> Any:
    base = typing.get_origin(annotation) or annotation
    if base is bool:
        return _bool(value)
    if base is int:
        number = _float(value)
        if not number.is_integer():
            raise TypeError
        return int(value) if isinstance(value, int | str) and str(value).lstrip("+-").isdigit() else int(number)
    if base is float:
        return _float(value)
    if base is str:
        return _str(value)
    if base is list:
        return _list(value, typing.get_args(annotation))
    if base is dict and isinstance(value, dict):
        return value
    raise TypeError


def _bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    word = str(value).lower() if isinstance(value, str | int) else ""
    if word in _YES or word == "1":
        return True
    if word in _NO or word == "0":
        return False
    raise TypeError


def _float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError
    if isinstance(value, str) and not _NUMBER.match(value.strip()):
        raise TypeError
    number = float(value)
    if math.isnan(number):
        raise TypeError
    return number


def _str(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise TypeError
    return str(value)


def _list(value: Any, inner: tuple[Any, ...]) -> list[Any]:
    if isinstance(value, str) and _LIST.match(value):
        value = [part.strip().strip("'\"") for part in value[1:-1].split(",") if part.strip()]
    if isinstance(value, str) and value:
        value = [value]
    if not isinstance(value, list | tuple):
        raise TypeError
    return [convert(item, inner[0]) for item in value] if inner else list(value)


N = TypeVar("N", bound=Node)
_NOTES = ("_target_", "_partial_", "_convert_", "_recursive_")


def plain(config: Any) -> Any:
    """Dictionaries, lists and scalars of an OmegaConf node, interpolations resolved; anything else as it is."""
    if not isinstance(config, Mapping) or isinstance(config, dict):
        return config
    from omegaconf import OmegaConf

    return OmegaConf.to_container(config, resolve=True) if OmegaConf.is_config(config) else dict(config)


def from_mapping(cls: type[N], config: Mapping[str, Any]) -> N:
    """A section of class ``cls`` with the values of a nested mapping; what it does not name keeps its default.

    Args:
        config: keys of the section; sub-sections may be mappings or sections. ``_target_`` and its like are passed over.

    Raises:
        ConfigError: a key that the section does not have, or a value of another type.

    Example:
        >>> from_mapping(ActorConfig, {"ppo_epochs": 2, "optim": {"lr": "1e-5"}}).optim.lr
        1e-05
    """
    schema = schema_of(cls)
    entries = _flat(schema, plain(config), "")
    values: dict[str, Any] = {}
    for key, leaf in schema.leaves.items():
        source: str | None = key
        while source is not None and source not in entries:
            source = schema.leaves[source].follows
        values[key] = entries[source] if source is not None else leaf.default
    made = build(cls, values)
    place(made)
    return made


def _flat(schema: Schema, config: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in config.items():
        key, leaf = f"{prefix}.{name}".removeprefix("."), schema.leaves.get(f"{prefix}.{name}".removeprefix("."))
        if name in _NOTES:
            continue
        if key in schema.upstream_only:
            _check_upstream_only(schema.upstream_only[key], value)
            continue
        if leaf is None:
            if not schema.is_section(key) or not isinstance(value, Mapping | Node):
                raise _unknown(schema, key, value)
            flat |= _flat(schema, value, key)  # type: ignore[arg-type]  # a section has items() too
            continue
        try:
            flat[key] = value if holds_mapping(leaf.type) else convert(value, leaf.type)
        except TypeError:
            raise ConfigError("wrong type", key=key, got=value, allowed=describe(leaf.type)) from None
    return flat


def _check_upstream_only(leaf: Leaf, value: Any) -> None:
    """Nothing follows the setting: of a missing feature it may only say what it would be anyway."""
    if leaf.no_effect is not None and value not in (leaf.default, {}):
        notice(leaf.key, f"has no effect: {leaf.no_effect}")
    if leaf.planned is not None and value != leaf.default:
        allowed = "null" if leaf.default is None else repr(leaf.default)
        raise NotBuiltError(f"not built yet: {leaf.planned}", key=leaf.key, got=value, allowed=allowed)


def _unknown(schema: Schema, key: str, value: Any) -> ConfigError:
    near = nearest(schema, key)
    fix = f"Did you mean {' or '.join(repr(name) for name in near)}?" if near else ""
    kind = "is a section" if schema.is_section(key) else "unknown setting"
    return ConfigError(f"{kind} of {schema.root.__name__}", key=key, got=value, fix=fix)


__all__ = [
    "ABSENT",
    "UNSET",
    "ConfigNode",
    "changed_names",
    "follows_another",
    "full_keys",
    "key_of",
    "leaves",
    "place",
    "record_reads",
    "replace",
    "section",
    "setting",
    "to_dict",
    "unread",
    "unrecorded",
    "was_typed",
]


@dataclasses.dataclass(frozen=True)
class ConfigNode(Node):
    """A section. Attribute, item, ``in`` and ``.get`` access; read-only.

    Example:
        >>> cfg.trainer.total_epochs == cfg["trainer"]["total_epochs"] == cfg.get("trainer").get("total_epochs")
        True
    """

    def __post_init__(self) -> None:
        for name, declared in type(self).__dataclass_fields__.items():
            inner = declared.metadata.get("section")
            if inner is not None and isinstance(self.__dict__[name], Mapping):
                object.__setattr__(self, name, from_mapping(inner, self.__dict__[name]))


SettingsSource = ConfigNode | Mapping[str, Any] | types.SimpleNamespace | None
"""What code of a user's may hand over for a section: a configuration node, a mapping, a namespace."""
