"""Upstream's import path of two configuration helpers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl.config import ConfigNode, PPOTrainerConfig, replace
from verl.config.validate import validate

__all__ = ["omega_conf_to_dataclass", "validate_config"]


def omega_conf_to_dataclass(config: Any, dataclass_type: type[ConfigNode] | None = None) -> Any:
    """A section as its dataclass; a section of this library is one already, a mapping needs ``dataclass_type``."""
    if isinstance(config, ConfigNode):
        return config
    if dataclass_type is None or not isinstance(config, Mapping):
        raise TypeError("dataclass_type is needed to turn a mapping into a section")
    return replace(dataclass_type(), **dict(config))


def validate_config(config: PPOTrainerConfig, use_reference_policy: bool, use_critic: bool) -> None:
    """Check the whole configuration; the two flags follow from it and are accepted for upstream's callers."""
    validate(config)
