"""Settings of Python as words of a command line: nested or dotted, with Python's values."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from verl.config.loading.files import parse_override
from verl.config.loading.groups import program_of
from verl.config.schema.node import schema_of
from verl.errors import ConfigError


class LoadedModel(Protocol):
    """A model of transformers."""

    config: Any

    def save_pretrained(self, save_directory: str | Path) -> object: ...


Model = str | Path | LoadedModel
"""A hub name, a folder, or a loaded model."""

PLAIN = re.compile(r"[A-Za-z_/][\w./-]*")
"""A text that needs no quotes inside of a list or mapping."""
NOT_TEXT = ("true", "false", "null", "nan", "inf")


def words_of(configuration: str, settings: Mapping[str, Any]) -> list[str]:
    """``{"trainer": {"seed": 1}, "data.shuffle": False}`` -> ``["trainer.seed=1", "data.shuffle=false"]``.

    Args:
        configuration: name of the settings (`verl.config.loading.groups.NAMES`); it says where a value begins that is
            itself a mapping.

    Raises:
        ConfigError: a value that no command line could hold: an object, a tensor, an open file.
    """
    schema = schema_of(program_of(configuration)[0].root)

    def leaves(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
        for name, value in data.items():
            key = f"{prefix}{name}"
            if isinstance(value, Mapping) and value and schema.split(key) is None:
                yield from leaves(value, f"{key}.")
            else:
                yield key, value

    return [word_of(key, value) for key, value in leaves(settings)]


def word_of(key: str, value: object) -> str:
    """One setting as ``key=value``, which reads back as the same value.

    Raises:
        ConfigError: see `words_of`.
    """
    value = _plain(key, value)
    word = f"{key}={value if isinstance(value, str) else _written(value)}"
    if isinstance(value, str) and not _reads_back(word, value):
        word = f"{key}={_written(value)}"
    if not _reads_back(word, value):
        raise ConfigError("this value cannot be written on a command line", key=key, got=value)
    return word


def _reads_back(word: str, value: object) -> bool:
    try:
        read = parse_override(word).value
    except ConfigError:
        return False
    return bool(read == value) and isinstance(read, bool) == isinstance(value, bool)


def _plain(key: str, value: object) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(key, inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(key, inner) for inner in value]
    if isinstance(value, Path):
        return os.fspath(value)
    if hasattr(value, "item") and getattr(value, "shape", None) == ():  # a number of numpy
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ConfigError(
        f"a setting is a number, a text, a flag, None, or a list or mapping of these, not {type(value).__name__}",
        key=key,
        got=value,
    )


def _written(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        if PLAIN.fullmatch(value) and value.lower() not in NOT_TEXT:
            return value
        escaped = value.replace("\\", "\\\\") if value.endswith("\\") else value
        return "'" + escaped.replace("'", "\\'") + "'"
    if isinstance(value, list):
        return f"[{','.join(map(_written, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{_written(name)}:{_written(inner)}" for name, inner in value.items()) + "}"
    return repr(value)
