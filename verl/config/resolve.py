"""From merged settings to a checked, frozen tree: interpolations, followed settings, types, choices, features."""

from __future__ import annotations

import re
import time
from typing import Any

from verl.config.convert import build, convert, describe, expand_path
from verl.config.merge import Merge, where
from verl.config.node import ConfigNode, place
from verl.config.planned import check_built, check_choices, tell_no_effect
from verl.config.schema import Leaf
from verl.errors import ConfigError, NotBuiltError


def resolve(merge: Merge) -> ConfigNode:
    """The configuration that the merged settings mean; all problems in one error."""
    problems = list(merge.problems)
    raw = _interpolated(merge, problems)
    tree: dict[str, Any] = {}
    late: list[ConfigError] = []
    for leaf in merge.schema.leaves.values():
        own = leaf.key in merge.values
        try:
            value = _finished(leaf, _at(raw, leaf.key))
            if own:
                _check(leaf, value, merge)
            _set(tree, leaf.key, value)
        except ConfigError as error:
            (problems if own else late).append(_located(error, merge, leaf.key))
    raise_all(problems or late)
    for key in merge.values:
        _tell(merge, merge.schema.leaves[key], _at(tree, key))
    made = build(merge.program.root, tree)
    place(made)
    return made


def raise_all(problems: list[ConfigError]) -> None:
    """Nothing, the one error, or one error with a line for each; a NotBuiltError if every one of them is."""
    unique = list({str(problem): problem for problem in problems}.values())
    if not unique:
        return
    if len(unique) == 1:
        raise unique[0]
    kind = NotBuiltError if all(isinstance(problem, NotBuiltError) for problem in unique) else ConfigError
    lines = [f"{len(unique)} settings cannot stand:", *(str(problem) for problem in unique)]
    raise kind("\n  - ".join(lines))


def _check(leaf: Leaf, value: Any, merge: Merge) -> None:
    problem = check_built(leaf, value, _default(leaf)) or check_choices(leaf, value)
    if problem is not None:
        raise problem


def _tell(merge: Merge, leaf: Leaf, value: Any) -> None:
    if leaf.planned is None:
        tell_no_effect(leaf, value, _default(leaf), on_command_line=not merge.origin[leaf.key].source)


def _finished(leaf: Leaf, value: Any) -> Any:
    """The value in its declared type, paths expanded."""
    if value == "???":
        raise ConfigError("has to be given a value", key=leaf.key)
    try:
        value = convert(value, leaf.type)
    except TypeError:
        raise ConfigError("wrong type", key=leaf.key, got=value, allowed=describe(leaf.type)) from None
    return expand_path(value, leaf.key) if leaf.path else value


def _default(leaf: Leaf) -> Any:
    return expand_path(leaf.default, leaf.key) if leaf.path and "${" not in str(leaf.default) else leaf.default


def _located(error: ConfigError, merge: Merge, key: str) -> ConfigError:
    """The same error with the file it comes from and the spelling that was used."""
    entry = merge.origin.get(key)
    if entry is None:
        return error
    said = "" if entry.key.startswith(key) or key.startswith(entry.key) else f", given as {entry.key}"
    note = f"{error.message}{said}{where(entry)}"
    return type(error)(note, key=error.key, got=error.got, allowed=error.allowed, fix=error.fix)


# ---- interpolation ---------------------------------------------------------------------------------------------------


def _interpolated(merge: Merge, problems: list[ConfigError]) -> dict[str, Any]:
    """All raw values with ``${...}`` replaced; a setting that follows another one is an interpolation of it."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if not OmegaConf.has_resolver("now"):
        OmegaConf.register_new_resolver("now", time.strftime, use_cache=True)
    nested: dict[str, Any] = {}
    for leaf in merge.schema.leaves.values():
        followed = f"${{{leaf.follows}}}" if leaf.follows else leaf.default
        _set(nested, leaf.key, merge.values.get(leaf.key, followed))
    for key, value in merge.variables.items():
        _set(nested, key, value)
    tree = OmegaConf.create(nested)
    try:
        return OmegaConf.to_container(tree, resolve=True)  # type: ignore[return-value]
    except OmegaConfBaseException:
        pass
    plain: dict[str, Any] = {}  # what is left once the culprits are found: enough to find other mistakes too
    for leaf in merge.schema.leaves.values():
        value = merge.values.get(leaf.key, leaf.default)
        _set(plain, leaf.key, leaf.default if "${" in str(value) else value)
        if leaf.key in merge.values:
            try:
                _resolved(OmegaConf.select(tree, leaf.key))
            except OmegaConfBaseException as error:
                problems.append(_unresolved(leaf, merge, error))
    return plain


def _resolved(value: Any) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _unresolved(leaf: Leaf, merge: Merge, error: Exception) -> ConfigError:
    value = merge.values[leaf.key]
    name = re.search(r"\$\{([^}:]+)", str(value))
    near = merge.schema.nearest(name[1]) if name else []
    fix = f"Did you mean {' or '.join(repr(key) for key in near)}?" if near else ""
    if name and name[1].isupper():
        fix = f"For an environment variable write ${{oc.env:{name[1]}}}, or ${name[1]} in a path."
    reason = str(error).splitlines()[0]
    return _located(ConfigError(f"cannot be resolved ({reason})", key=leaf.key, got=value, fix=fix), merge, leaf.key)


def _at(tree: dict[str, Any], key: str) -> Any:
    for part in key.split("."):
        tree = tree[part]
    return tree


def _set(tree: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for part in sections:
        tree = tree.setdefault(part, {})
    tree[name] = value
