"""Read one setting from whatever carries it: a configuration node, a mapping, or a plain namespace.

Users' datasets and tests construct the datasets with any of the three.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from verl.config.schema.node import SettingsSource


@runtime_checkable
class HasGet(Protocol):
    def get(self, key: str, default: object = None) -> Any: ...


def read(config: SettingsSource, name: str, default: object = None) -> Any:
    """The setting ``name``, or ``default`` where the carrier does not have it or holds None."""
    if config is None:
        return default
    value = config.get(name, default) if isinstance(config, HasGet) else getattr(config, name, default)
    return default if value is None else value


def read_mapping(config: SettingsSource, name: str) -> dict[str, Any]:
    """A setting that is a mapping, as a plain dict."""
    return dict(read(config, name, {}).items())


def read_number(config: SettingsSource, name: str, default: int) -> int:
    return int(read(config, name, default))
