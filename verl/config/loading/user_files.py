"""YAML files that a setting names: tools, simulated users, agent loops. Plain data; nothing in them is resolved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from verl import env
from verl.errors import ConfigError, suggest


def read_user_yaml(path: str, key: str) -> Any:
    """What a YAML file holds, as lists, mappings and scalars; ``${...}`` stays text.

    Args:
        path: ``~`` and variables are expanded.
        key: the setting that names the file, for messages.

    Raises:
        ConfigError: no such file, not YAML, or a YAML tag that would run code.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    file = Path(env.expand(path.removeprefix("file://")))
    if not file.is_file():
        names = [p.name for p in file.parent.iterdir()] if file.parent.is_dir() else []
        raise ConfigError("no such file", key=key, got=path, fix=suggest(file.name, names))
    try:
        return OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    except (YAMLError, OmegaConfBaseException, OSError, ValueError) as error:
        raise ConfigError(f"not readable as YAML: {error}", key=key, got=str(file)) from error


def entries_of(data: Any, key: str, source: str, section: str | None = None) -> list[dict[str, Any]]:
    """The list of mappings that such a file holds, under ``section`` or at its top.

    Raises:
        ConfigError: something else.
    """
    entries = data.get(section) if section and isinstance(data, dict) else data
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        allowed = f"'{section}:' with a list of entries" if section else "a list of entries"
        raise ConfigError(f"{source} holds something else", key=key, got=type(entries).__name__, allowed=allowed)
    return entries
