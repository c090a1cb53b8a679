"""Secrets are left out of whatever is written, printed or sent of a configuration: files of a run, trackers.

What counts as one: settings whose names say so (``api_key``, ``token``), and what `verl.errors.hide_in_text` leaves out of
texts: the user's part of an address, values of its query, words in the form that well-known services give their keys.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from verl.errors import HIDDEN, hide_in_text

_NAMED = (
    r"(?:api|access|secret|private|signing)[_-]?keys?|password|passwd|passphrase|secrets?|credentials?|authorization"
    r"|(?:auth|access|api|bearer|refresh|session|hf|hub|wandb|github|git)[_-]?token"
)
_SETTING = re.compile(rf"(?:^|[_.-])(?:{_NAMED})$", re.IGNORECASE)
_FREE_SETTING = re.compile(rf"(?:^|[_.-])(?:{_NAMED}|key|token|auth|pwd|cookie)$|(?:key|token)$", re.IGNORECASE)
_FREE = re.compile(r"(?:kwargs|headers|env|env_vars|environment)$", re.IGNORECASE)
"""Mappings of the user's own, in which every key or token is one; ours have columns of data by that name, too."""


def hide(value: object, name: str = "", free: bool = False) -> Any:
    """Mappings, lists and texts without secrets; other values as they are.

    Args:
        name: the key under which the value stands.
        free: it stands in a mapping of the user's own.
    """
    if isinstance(value, Mapping):
        inside = free or _FREE.search(name) is not None
        return {key: hide(inner, str(key), inside) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [hide(inner, name, free) for inner in value]
    if (_FREE_SETTING if free else _SETTING).search(name) and value not in (None, "", True, False):
        return HIDDEN
    return hide_in_text(value) if isinstance(value, str) else value
