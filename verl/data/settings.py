"""Read one setting from whatever carries it: a configuration node, a mapping, or a plain namespace.

Users' datasets and tests construct the datasets with any of the three.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class HasGet(Protocol):
    def get(self, key: str, default: Any = None) -> Any: ...


def read(config: Any, name: str, default: Any = None) -> Any:
    """The setting ``name``, or ``default`` where the carrier does not have it or holds None."""
    if config is None:
        return default
    value = config.get(name, default) if isinstance(config, HasGet) else getattr(config, name, default)
    return default if value is None else value


def read_mapping(config: Any, name: str) -> dict[str, Any]:
    """A setting that is a mapping, as a plain dict."""
    return dict(read(config, name, {}).items())


def read_number(config: Any, name: str, default: int) -> int:
    return int(read(config, name, default))
