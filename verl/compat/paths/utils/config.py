"""Upstream's import path of two configuration helpers."""

from collections.abc import Mapping
from typing import Any

from verl.config import ConfigNode, PPOTrainerConfig
from verl.config.loading.configuration import config_from
from verl.config.rules.validate import validate
from verl.config.schema.node import from_mapping, plain
from verl.registry import load_object


def omega_conf_to_dataclass(config: Any, dataclass_type: type | None = None) -> Any:
    """A mapping (OmegaConf or plain) as a dataclass: ``dataclass_type``, or the class that its ``_target_`` names.

    Sections of this library are typed and checked; another dataclass gets the keys as arguments. A section that is a
    dataclass already comes back as it is, an empty mapping becomes the defaults.
    """
    if isinstance(config, ConfigNode):
        return config
    values: Mapping[str, Any] = plain(config) or {}
    if dataclass_type is None:
        if not values.get("_target_"):
            raise TypeError("dataclass_type is needed to turn a mapping without _target_ into a section")
        dataclass_type = load_object(values["_target_"])
    if issubclass(dataclass_type, ConfigNode):
        return from_mapping(dataclass_type, values)
    return dataclass_type(**{name: value for name, value in values.items() if name != "_target_"})


def validate_config(config: PPOTrainerConfig | Mapping[str, Any], use_reference_policy: bool, use_critic: bool) -> None:
    """Check the whole configuration; the two flags follow from it and are accepted for upstream's callers."""
    validate(config) if isinstance(config, PPOTrainerConfig) else config_from("ppo_trainer", config)
