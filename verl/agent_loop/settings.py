"""Checks that the arguments of several loops share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from verl.errors import ConfigError, suggest

PLACES = "file.py:name or my_pkg.mod:name"
"""Where code of the user's is."""


def known_arguments(entry: Mapping[str, Any], settings: type, needs: str, what: str, form: str) -> None:
    """Refuse arguments that the settings do not have, naming the nearest, and a missing one.

    Args:
        needs: the argument without which there is nothing to run.
        what: who needs to know what, for the message.
        form: what it looks like.

    Raises:
        ConfigError: either.
    """
    if not entry.get(needs):
        raise ConfigError(
            what,
            key=needs,
            allowed=form,
            fix="Set it in the YAML file of actor_rollout_ref.rollout.agent.agent_loop_config_path.",
        )
    names = [f.name for f in fields(settings)]
    for name in entry:
        if name not in names:
            raise ConfigError("unknown argument of this loop", key=name, allowed=names, fix=suggest(name, names))


def positive(value: object, key: str) -> float:
    """A number of seconds or the like."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ConfigError("must be a positive number", key=key, got=value)
    return float(value)
