"""What settings must be together, as data: a row says when it speaks, about which setting, and what to change.

A row belongs to the class of a section and is judged wherever that section stands; one that compares sections belongs
to the class of a program. Its texts are filled in with settings of the section by name (``{lr}``,
``{data.train_batch_size}``), ``{key}`` (the full key of the setting), ``{got}`` (its value) and ``{at}`` (the section).
What one setting may be by itself (``within``) and what it has no effect without (``needs``) stand at its declaration.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

from verl.config.schema.leaves import Leaf, schema_of
from verl.config.schema.node import was_typed
from verl.config.schema.root import PPOTrainerConfig, uses_critic
from verl.errors import ConfigError
from verl.metrics import notice

Text = str | Callable[[Any], str]
NOTICE = "notice"
_OFF: tuple[Any, ...] = (None, False, "", 0, -1, [], {})
_USES = {"critic": uses_critic, "reward.reward_model": lambda cfg: cfg.reward.reward_model.enable}
"""Sections of an RL run whose settings are judged only where it uses them."""


@dataclass(frozen=True)
class Rule:
    """One row.

    Args:
        name: of the setting at fault, below the section; a function of the section where it is one of several.
        says: what is wrong, or why the setting has no effect; a function of the section where numbers are computed.
        when: of the section: whether the row speaks.
        fix, allowed: see `verl.errors.VerlError`.
        kind: `ConfigError`, `NotBuiltError`, or `NOTICE`.
        shows: whether an error shows the value.
    """

    name: Text
    says: Text
    when: Callable[[Any], Any]
    fix: Text = ""
    allowed: Any = None
    kind: type[ConfigError] | str = ConfigError
    shows: bool = True


Table = Mapping[type, tuple[Rule, ...]]


class _Words(dict[str, Any]):
    """What a text is filled in with."""

    def __init__(self, node: Any, at: str, name: Text):
        name = name(node) if callable(name) else name
        key = f"{at}.{name}".removeprefix(".")
        super().__init__(at=at, key=key, got=value_at(node, name))
        self.node = node

    def __missing__(self, name: str) -> Any:
        return self.node[name]

    def fill(self, text: Any) -> Any:
        if callable(text):
            return text(self.node)
        return text.format_map(self) if isinstance(text, str) else text


def value_at(node: Any, key: str) -> Any:
    """The value of a setting by its dotted name below a section."""
    return reduce(lambda section, name: section[name], key.split("."), node) if key else node


def judged(table: Table) -> Callable[[Any], list[ConfigError]]:
    """A rule of the validation: every error of the rows."""
    return lambda cfg: [_error(row, words) for row, words in _speaking(table, cfg) if row.kind != NOTICE]


def tell(table: Table, cfg: Any) -> None:
    """Every notice of the rows."""
    for row, words in _speaking(table, cfg):
        if row.kind == NOTICE:
            notice(words["key"], words.fill(row.says))


def out_of_bounds(cfg: Any) -> list[ConfigError]:
    """Settings that are by themselves not what they may be."""
    leaves = schema_of(type(cfg)).leaves.items()
    bounded = [(key, leaf) for key, leaf in leaves if leaf.within and _is_used(cfg, key)]
    return [
        problem for key, leaf in bounded for bound in leaf.within for problem in bound.problems(key, value_at(cfg, key))
    ]


def tell_without_effect(cfg: Any) -> None:
    """A notice of every changed setting whose switch is off."""
    for key, leaf in schema_of(type(cfg)).leaves.items():
        if leaf.needs and _is_changed(cfg, leaf) and _is_used(cfg, key) and not _is_on(cfg, leaf.needs):
            notice(key, f"has no effect without {leaf.needs}")


def _speaking(table: Table, cfg: Any) -> Iterator[tuple[Rule, _Words]]:
    for at, cls in {"": type(cfg), **schema_of(type(cfg)).sections}.items():
        rows = [row for owner, of_owner in table.items() if issubclass(cls, owner) for row in of_owner]
        if rows and _is_used(cfg, at):
            node = value_at(cfg, at)
            yield from ((row, _Words(node, at, row.name)) for row in rows if row.when(node))


def _error(row: Rule, words: _Words) -> ConfigError:
    assert not isinstance(row.kind, str)
    got = words["got"] if row.shows else None
    return row.kind(
        words.fill(row.says), key=words["key"], got=got, allowed=words.fill(row.allowed), fix=words.fill(row.fix)
    )


def _is_used(cfg: Any, key: str) -> bool:
    if not isinstance(cfg, PPOTrainerConfig):
        return True
    return all(uses(cfg) for section, uses in _USES.items() if f"{key}.".startswith(f"{section}."))


def _is_changed(cfg: Any, leaf: Leaf) -> bool:
    """Typed, or not the default; null says nothing, and a path is expanded, so it never looks like its default."""
    section, _, name = leaf.key.rpartition(".")
    node = value_at(cfg, section)
    if node[name] is None or was_typed(node, name):
        return node[name] is not None
    return leaf.follows is None and not (leaf.path and leaf.default) and node[name] != leaf.default


def _is_on(cfg: Any, switch: str) -> bool:
    key, _, values = switch.partition("=")
    value = value_at(cfg, key.partition(",")[0])
    return str(value).lower() in re.split(", | or ", values.lower()) if values else value not in _OFF
