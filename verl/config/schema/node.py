"""What every section of the configuration is: a frozen dataclass that takes mappings for the sections in it.

How settings are declared, read and compared is in `verl.config.schema.tree`, below the code that makes nodes of mappings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from verl.config.schema.mapping import from_mapping
from verl.config.schema.tree import (
    ABSENT,
    UNSET,
    Node,
    changed_names,
    follows_another,
    full_keys,
    key_of,
    leaves,
    place,
    record_reads,
    replace,
    section,
    setting,
    to_dict,
    unread,
    unrecorded,
    was_typed,
)

__all__ = [
    "ABSENT",
    "UNSET",
    "ConfigNode",
    "changed_names",
    "follows_another",
    "full_keys",
    "key_of",
    "leaves",
    "place",
    "record_reads",
    "replace",
    "section",
    "setting",
    "to_dict",
    "unread",
    "unrecorded",
    "was_typed",
]


@dataclasses.dataclass(frozen=True)
class ConfigNode(Node):
    """A section. Attribute, item, ``in`` and ``.get`` access; read-only.

    Example:
        >>> cfg.trainer.total_epochs == cfg["trainer"]["total_epochs"] == cfg.get("trainer").get("total_epochs")
        True
    """

    def __post_init__(self) -> None:
        for name, field in type(self).__dataclass_fields__.items():
            section = field.metadata.get("section")
            if section is not None and isinstance(self.__dict__[name], Mapping):
                object.__setattr__(self, name, from_mapping(section, self.__dict__[name]))
