"""Settings that do not exist: one problem for each that has a near name, one for all others of a section."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from verl.config.loading.files import DefaultsEntry
from verl.config.schema.leaves import Schema
from verl.config.schema.nearest import nearest, open_key
from verl.errors import ConfigError

_LISTED = 8


def unknown_settings(
    schema: Schema, entries: Iterable[tuple[str, DefaultsEntry]], where: Callable[[DefaultsEntry], str]
) -> list[ConfigError]:
    """One problem for each setting that has a near name, and one for all others of a section.

    Args:
        entries: the settings, by the key that nothing has, with what was given.
        where: says the file of an entry.
    """
    return [_problem(schema, group, where) for group in _groups(schema, entries)]


def _groups(
    schema: Schema, entries: Iterable[tuple[str, DefaultsEntry]]
) -> Iterator[list[tuple[str, DefaultsEntry, str]]]:
    """Key, entry and section of each; those of one section together where no name is near, or where it is no section."""
    grouped: dict[Any, list[tuple[str, DefaultsEntry, str]]] = {}
    for key, entry in entries:
        section = _section(schema, key)
        is_alone = "." not in key or (schema.is_section(section) and nearest(schema, key))
        grouped.setdefault(key if is_alone else (section, entry.source), []).append((key, entry, section))
    yield from grouped.values()


def _problem(
    schema: Schema, group: list[tuple[str, DefaultsEntry, str]], where: Callable[[DefaultsEntry], str]
) -> ConfigError:
    key, entry, section = group[0]
    takes = open_key(schema, key)
    into = f"A field of the model's or the engine's own goes into {takes}." if takes else ""
    if len(group) == 1:
        near = nearest(schema, key)
        meant = f"Did you mean {' or '.join(repr(name) for name in near)}?" if near else into
        fix = meant or "--help lists every setting."
        return ConfigError(f"unknown setting{where(entry)}", key=key, got=entry.value, fix=fix)
    names = [name[len(section) + 1 :] for name, _, _ in group]
    listed = ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")
    what = "settings of it" if schema.is_section(section) else "settings of a section that does not exist"
    return ConfigError(
        f"unknown {what}: {listed}{where(entry)}", key=section, fix=into or "--help lists every setting."
    )


def _section(schema: Schema, key: str) -> str:
    """The first part of a key that names nothing; the section of the last name where all of them are known."""
    parts = key.split(".")
    for cut in range(1, len(parts)):
        section = ".".join(parts[:cut])
        if not schema.is_section(section):
            return section
    return ".".join(parts[:-1])
