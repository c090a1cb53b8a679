"""What every section of the configuration is: a frozen dataclass that takes mappings for the sections in it.

YAML and shells lose types: ``1e-6`` may arrive as a text, ``3`` as a float, a single file where a list is meant. What
can only mean one thing is converted; everything else is refused. How settings are declared, read and compared is in
`verl.config.schema.tree`.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import re
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from verl import env
from verl.config.schema.leaves import Leaf, Schema, holds_mapping, nearest, schema_of
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

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", list: "a list"}
_YES, _NO = ("true", "yes", "on"), ("false", "no", "off")
_LIST = re.compile(r"\[[^\[\]{}]*\]$")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$|[+-]?inf$")


def convert(value: Any, annotation: Any) -> Any:
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


def describe(annotation: Any) -> str:
    """What a person may write for this type."""
    names = []
    for option in _options(annotation):
        base = typing.get_origin(option) or option
        names.append("null" if base is type(None) else _WORDS.get(base, "a mapping"))
    return " or ".join(names)


def expand_path(value: Any, key: str) -> Any:
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
    for name, field in cls.__dataclass_fields__.items():
        key = f"{prefix}.{name}".removeprefix(".")
        inner = field.metadata.get("section")
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
        for name, field in type(self).__dataclass_fields__.items():
            section = field.metadata.get("section")
            if section is not None and isinstance(self.__dict__[name], Mapping):
                object.__setattr__(self, name, from_mapping(section, self.__dict__[name]))
