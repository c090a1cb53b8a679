"""The contract of a simulated user, and the YAML file that names some.

One object serves all trajectories; what belongs to one of them is an instance, named by an id. All methods run on the
event loop of the tools (`verl.tools.runner`).
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from verl.config.loading.files import entries_of, read_user_yaml
from verl.errors import ConfigError
from verl.registry import load_object

KEY = "actor_rollout_ref.rollout.multi_turn.interaction_config_path"


class BaseInteraction:
    """A simulated user; subclasses override `generate_response` and what else they need.

    Args:
        config: the entry's ``config`` in the YAML file, with the entry's ``name``.

    Example:
        >>> class Doubter(BaseInteraction):
        ...     async def generate_response(self, instance_id, messages, **kwargs):
        ...         return len(messages) > 4, "Are you sure?", 0.0, {}
    """

    def __init__(self, config: Mapping[str, Any]):
        self.config: dict[str, Any] = dict(config)
        self.name: str = str(self.config.get("name", "interaction_agent"))

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Begin with one trajectory; the id of the instance.

        Args:
            kwargs: the row's ``interaction_kwargs``.
        """
        return instance_id or str(uuid.uuid4())

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """(whether the conversation is over, what the user says, reward of the turn, metrics).

        Args:
            messages: the conversation so far; the last one is the model's.
        """
        return False, "Your current result seems acceptable.", 0.8, {}

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        """A score for the conversation."""
        return 0.0

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """Let go of an instance; called in any case."""
        return None


def load_interactions(path: str | None) -> dict[str, BaseInteraction]:
    """The simulated users of a YAML file by name.

    Args:
        path: YAML with ``interaction:``, a list of entries with ``class_name``, ``name`` (else the class' name in lower
            case without "interaction") and ``config``.

    Raises:
        ConfigError: the file or a class is missing, or two users have one name.
    """
    by_name: dict[str, BaseInteraction] = {}
    entries = entries_of(read_user_yaml(path, KEY), KEY, path, "interaction") if path else []
    for number, entry in enumerate(entries):
        place = f"{path}, interaction[{number}]"
        if not isinstance(entry.get("class_name"), str):
            raise ConfigError("a simulated user without a class_name", key=place, got=sorted(entry))
        user_class = load_object(entry["class_name"])
        if not (isinstance(user_class, type) and issubclass(user_class, BaseInteraction)):
            allowed = "a subclass of BaseInteraction"
            raise ConfigError("not a simulated user", key=place, got=entry["class_name"], allowed=allowed)
        name = entry.get("name") or user_class.__name__.lower().removesuffix("interaction")
        if name in by_name:
            raise ConfigError("two simulated users have one name", key=place, got=name)
        by_name[str(name)] = user_class({**(entry.get("config") or {}), "name": str(name)})
    return by_name
