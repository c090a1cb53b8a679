"""From merged settings to a checked, frozen tree: interpolations, followed settings, types, choices, features."""

from __future__ import annotations

from typing import Any

from verl.config.loading.interpolate import interpolated
from verl.config.loading.merge import Merge, where
from verl.config.loading.secrets import is_hidden
from verl.config.rules.megatron_lora import carry_over
from verl.config.rules.planned import ROLLOUT_ENGINES, check_built, check_choices, for_engine, tell_no_effect
from verl.config.rules.refusals import not_built_choices, raise_all
from verl.config.schema.convert import build, convert, describe, expand_path
from verl.config.schema.leaves import Leaf
from verl.config.schema.node import ConfigNode, place
from verl.errors import ConfigError, NotBuiltError


def resolve(merge: Merge) -> ConfigNode:
    """The configuration that the merged settings mean; all problems in one error."""
    raw, nowhere = interpolated(merge)
    problems = merge.problems + [_located(error, merge, str(error.key)) for error in nowhere]
    late: list[ConfigError] = []
    values: dict[str, Any] = {}
    for key, leaf in merge.schema.every.items():
        try:
            values[key] = _finished(leaf, raw[key])
        except ConfigError as error:
            (problems if key in merge.values else late).append(_located(error, merge, key))
    engine = next((values[key] for key in ROLLOUT_ENGINES if key in values), None)
    leaves = [for_engine(merge.schema.every[key], engine) for key in merge.origin if key in values]
    for leaf in leaves:
        usual = _usual(leaf, values)
        problem = check_built(leaf, values[leaf.key], usual) or check_choices(leaf, values[leaf.key])
        problems += [_located(problem, merge, leaf.key)] if problem else []
    problems += [_located(problem, merge, str(problem.key)) for problem in not_built_choices(values)]
    carried = carry_over(merge.schema, values, merge.origin)
    problems += [_located(problem, merge, str(problem.key)) for problem in carried]
    raise_all(problems or late)
    for leaf in leaves:
        if leaf.planned is None:
            on_command_line = not merge.origin[leaf.key].source
            tell_no_effect(leaf, values[leaf.key], _usual(leaf, values), on_command_line)
    made = build(merge.program.root, values)
    place(made, typed=frozenset(key for key, entry in merge.origin.items() if not entry.source))
    return made


def _finished(leaf: Leaf, value: Any) -> Any:
    """The value in its declared type, paths expanded."""
    if value == "???":
        raise ConfigError("has to be given a value", key=leaf.key)
    if is_hidden(value):
        raise ConfigError(
            "a secret was left out here when this configuration was written",
            key=leaf.key,
            got=value,
            fix="Give the value again, on the command line or in a file of your own.",
        )
    try:
        value = convert(value, leaf.type)
    except TypeError:
        if leaf.planned is not None and not leaf.engines:
            return value  # refused by the feature's name, whatever it is
        raise ConfigError("wrong type", key=leaf.key, got=value, allowed=describe(leaf.type)) from None
    return expand_path(value, leaf.key) if leaf.path else value


def _usual(leaf: Leaf, values: dict[str, Any]) -> list[Any]:
    """What a leaf is where nobody sets it: its default, or the value it follows."""
    plain = not leaf.path or "${" in str(leaf.default)
    followed = [values[leaf.follows]] if leaf.follows in values else []
    return [leaf.default if plain else expand_path(leaf.default, leaf.key), *followed]


def _located(error: ConfigError, merge: Merge, key: str) -> ConfigError:
    """The same error with the file it comes from and the spelling that was used."""
    entry = merge.origin.get(key)
    if entry is None:
        return error
    alias = "" if entry.key.startswith(key) or key.startswith(entry.key) else f", given as {entry.key}"
    note = f"{error.message}{alias}{where(entry)}"
    made = type(error)(note, key=error.key, got=error.got, allowed=error.allowed, fix=error.fix)
    if isinstance(error, NotBuiltError) and isinstance(made, NotBuiltError):
        made.feature = error.feature
    return made
