"""Checks the ``config`` of a built-in tool in the YAML file: names and types, before anything is called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl.errors import ConfigError, suggest


def read_settings(tool: str, config: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a tool, with its defaults for what is not given.

    A setting has the type of its default; a default of None stands for text. ``type`` is accepted and left out:
    upstream's files say ``type: native``.

    Raises:
        ConfigError: a name or type is wrong.
    """
    settings = dict(defaults)
    for name, value in config.items():
        if name == "type":
            continue
        key = f"{tool}.config.{name}"
        if name not in defaults:
            raise ConfigError("unknown setting", key=key, allowed=sorted(defaults), fix=suggest(name, defaults))
        settings[name] = _checked(key, value, defaults[name])
    return settings


def _checked(key: str, value: Any, default: Any) -> Any:
    if value is None and default is None:
        return None
    kind: tuple[type, ...] = str if default is None else type(default)  # type: ignore[assignment]
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ConfigError("has the wrong type", key=key, got=value, allowed=getattr(kind, "__name__", str(kind)))
    if isinstance(value, (int, float)) and not isinstance(value, bool) and not value > 0:
        raise ConfigError("must be positive", key=key, got=value)
    return value
