"""Roles: the names under which the dataflow knows its workers, and which calls each one takes.

The mapping is open: a recipe adds a role by adding a handle under a new name. `Role` only lists the
names that the library itself uses.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Literal

from verl.errors import ConfigError, suggest

RoleKind = Literal["trainable", "frozen", "sampler", "scorer"]
"""``trainable``: infer, train and copy_weights; ``frozen``: infer and receive copies; ``sampler``: generate;
``scorer``: score texts."""


class Role(Enum):
    """The known roles; ``str(role)`` is the name used for worker prefixes, metrics and folders."""

    Actor = auto()
    Rollout = auto()
    ActorRollout = auto()
    Critic = auto()
    RefPolicy = auto()
    RewardModel = auto()
    ActorRolloutRef = auto()
    Env = auto()
    TeacherModel = auto()

    def __str__(self) -> str:
        return _ROLE_NAMES[self.name]

    @classmethod
    def from_string(cls, name: str) -> Role:
        """The role with this ``str()``."""
        for role in cls:
            if str(role) == name:
                return role
        names = [str(role) for role in cls]
        raise ConfigError("unknown role", got=name, allowed=names, fix=suggest(name, names))


_ROLE_NAMES = {
    "Actor": "actor",
    "Rollout": "rollout",
    "ActorRollout": "actor_rollout",
    "Critic": "critic",
    "RefPolicy": "ref",
    "RewardModel": "rm",
    "ActorRolloutRef": "actor_rollout_ref",
    "Env": "env",
    "TeacherModel": "teacher",
}
