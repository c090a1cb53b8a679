"""``${...}`` in settings, by OmegaConf, and settings that take the value of another one while they are not set."""

from __future__ import annotations

import re
import time
from typing import Any

from verl.config.loading.merge import Merge
from verl.config.schema.leaves import Leaf
from verl.config.schema.nearest import nearest
from verl.errors import ConfigError

_PLAIN = re.compile(r"[A-Za-z_][\w.]*")


def interpolated(merge: Merge) -> tuple[dict[str, Any], list[ConfigError]]:
    """The value of every leaf, not yet converted, and the interpolations that lead nowhere."""
    leaves, values = merge.schema.every, merge.values
    texts = {key: values.get(key, leaf.default) for key, leaf in leaves.items()}
    texts = {key: value for key, value in texts.items() if "${" in str(value)}
    resolved, problems = _resolve(merge, texts)

    def value_of(leaf: Leaf) -> Any:
        if leaf.key in resolved:
            return resolved[leaf.key]
        if leaf.key in values or leaf.follows is None:
            return values.get(leaf.key, leaf.default)
        return value_of(leaves[leaf.follows])

    return {key: value_of(leaf) for key, leaf in leaves.items()}, problems


def _resolve(merge: Merge, texts: dict[str, Any]) -> tuple[dict[str, Any], list[ConfigError]]:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if not OmegaConf.has_resolver("now"):
        OmegaConf.register_new_resolver("now", time.strftime, use_cache=True)
    nested: dict[str, Any] = {}
    for key in _needed(merge, texts):
        _set(nested, key, _raw(merge, key))
    for key, value in merge.variables.items():
        _set(nested, key, value)
    tree = OmegaConf.create(nested)
    resolved, problems = {}, []
    for key in texts:
        try:
            value = OmegaConf.select(tree, key)
            resolved[key] = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        except OmegaConfBaseException as error:
            resolved[key] = merge.schema.every[key].default
            if key in merge.values:
                problems.append(_nowhere(merge, key, error))
    return resolved, problems


def _needed(merge: Merge, texts: dict[str, Any]) -> list[str]:
    """The keys that resolving ``texts`` can look at: all of them once anything but ``${a.b}`` is written."""
    leaves, needed, todo = merge.schema.every, set(), list(texts)
    while todo:
        key = todo.pop()
        if key in needed:
            continue
        needed.add(key)
        text = str(_raw(merge, key))
        for name in re.findall(r"\$\{([^}]*)", text):
            if name in leaves:
                todo.append(name)
            elif not _PLAIN.fullmatch(name) or any(other.startswith(f"{name}.") for other in leaves):
                return list(leaves)
    return [key for key in leaves if key in needed]


def _raw(merge: Merge, key: str) -> Any:
    leaf = merge.schema.every[key]
    return merge.values.get(key, f"${{{leaf.follows}}}" if leaf.follows else leaf.default)


def _nowhere(merge: Merge, key: str, error: Exception) -> ConfigError:
    value = merge.values[key]
    name = re.search(r"\$\{([^}:]+)", str(value))
    near = nearest(merge.schema, name[1]) if name else []
    fix = f"Did you mean {' or '.join(repr(other) for other in near)}?" if near else ""
    if name and name[1].isupper():
        fix = f"For an environment variable write ${{oc.env:{name[1]}}}, or ${name[1]} in a path."
    reason = str(error).splitlines()[0]
    return ConfigError(f"cannot be resolved ({reason})", key=key, got=value, fix=fix)


def _set(tree: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for part in sections:
        tree = tree.setdefault(part, {})
    tree[name] = value
