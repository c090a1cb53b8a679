"""A typed section from a mapping: for code that still holds OmegaConf or plain dictionaries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from verl.config.schema.convert import build, convert, describe
from verl.config.schema.leaves import Leaf, Schema, holds_mapping, schema_of
from verl.config.schema.nearest import nearest
from verl.config.schema.tree import Node, place
from verl.errors import ConfigError, NotBuiltError
from verl.metrics import notice

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
