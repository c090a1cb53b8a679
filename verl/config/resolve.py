"""From merged settings to a checked, frozen tree: interpolations, followed settings, types, choices, features."""

from __future__ import annotations

from typing import Any

from verl.config.convert import build, convert, describe, expand_path
from verl.config.interpolate import interpolated
from verl.config.merge import Merge, where
from verl.config.node import ConfigNode, place
from verl.config.planned import check_built, check_choices, tell_no_effect
from verl.config.schema import Leaf
from verl.errors import ConfigError, NotBuiltError


def resolve(merge: Merge) -> ConfigNode:
    """The configuration that the merged settings mean; all problems in one error."""
    raw, nowhere = interpolated(merge)
    problems = merge.problems + [_located(error, merge, str(error.key)) for error in nowhere]
    late: list[ConfigError] = []
    values: dict[str, Any] = {}
    for key, leaf in merge.schema.leaves.items():
        own = key in merge.values
        try:
            values[key] = _finished(leaf, raw[key])
            if own:
                _check(leaf, values[key])
        except ConfigError as error:
            (problems if own else late).append(_located(error, merge, key))
    raise_all(problems or late)
    for key, entry in merge.origin.items():
        leaf = merge.schema.leaves[key]
        if leaf.planned is None:
            tell_no_effect(leaf, values[key], _default(leaf), on_command_line=not entry.source)
    made = build(merge.program.root, values)
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


def _check(leaf: Leaf, value: Any) -> None:
    problem = check_built(leaf, value, _default(leaf)) or check_choices(leaf, value)
    if problem is not None:
        raise problem


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
