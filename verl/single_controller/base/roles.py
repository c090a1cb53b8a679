"""Roles: the names under which the dataflow knows its workers, and what may be asked of each.

The mapping is open: a recipe adds a role by adding a name. `Role` only lists the names that the library itself uses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Literal, get_args

from verl.errors import ConfigError, WorkerError, suggest

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
        known = [str(role) for role in cls]
        raise ConfigError("unknown role", got=name, allowed=known, fix=suggest(name, known))


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


@dataclass(frozen=True)
class RoleEntry:
    """One role: what answers its calls (a worker group or a `Handle`), and its kind."""

    name: str
    handle: Any
    kind: RoleKind


class Roles(Mapping[str, Any]):
    """Name -> handle, each with a kind. Keys are names or `Role` members.

    Example:
        >>> roles = Roles()
        >>> roles.add(Role.Actor, actor_group, "trainable"); roles.add("implicit_prm", prm_group, "trainable")
        >>> roles["actor"].compute_log_prob(batch); "ref" in roles; roles.of_kind("trainable")
    """

    def __init__(self) -> None:
        self._entries: dict[str, RoleEntry] = {}

    def add(self, role: Role | str, handle: Any, kind: RoleKind) -> None:
        """Add a role; its name must be new."""
        name = str(role)
        if kind not in get_args(RoleKind):
            raise ConfigError(f"unknown kind of the role {name!r}", got=kind, allowed=get_args(RoleKind))
        if name in self._entries:
            raise ConfigError(f"the role {name!r} exists already", fix="Give yours another name.")
        self._entries[name] = RoleEntry(name, handle, kind)

    def entry(self, role: Role | str) -> RoleEntry:
        name = str(role)
        if name not in self._entries:
            raise WorkerError(
                f"this run has no role {name!r}", allowed=sorted(self._entries), fix=suggest(name, self._entries)
            )
        return self._entries[name]

    def kind(self, role: Role | str) -> RoleKind:
        return self.entry(role).kind

    def of_kind(self, kind: RoleKind) -> dict[str, Any]:
        """The roles of one kind, in the order in which they were added."""
        return {name: entry.handle for name, entry in self._entries.items() if entry.kind == kind}

    def __getitem__(self, role: Role | str) -> Any:
        return self.entry(role).handle

    def __contains__(self, role: object) -> bool:
        return str(role) in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
