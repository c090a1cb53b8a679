"""What parts of one method the settings of a run have to name together."""

from __future__ import annotations

import re

from verl.config.rules.checks import Problems
from verl.errors import ConfigError


def names_part(path: str, *names: str) -> bool:
    """Whether the last name of a path, ``a.b:name`` or ``a.b.name``, is one of these."""
    return re.split("[.:]", path)[-1] in names


def without_part(key: str, path: str, message: str, *parts: str) -> Problems:
    """A problem where a setting names none of the parts.

    Args:
        key: of the setting, whose value is ``path``.
        message: why a part is needed.
        parts: ``pkg.mod:name`` each; the first is the advice.
    """
    if names_part(path, *(part.partition(":")[2] for part in parts)):
        return []
    return [ConfigError(message, key=key, got=path, allowed=parts, fix=f"Set it to {parts[0]}.")]
