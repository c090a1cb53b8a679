"""Roles: the names under which the dataflow knows its workers, and what may be asked of each.

The mapping is open: a recipe adds a role by adding a handle under a new name. `Role` only lists the
names that the library itself uses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Literal, get_args

from verl.errors import ConfigError, WorkerError, suggest
from verl.metrics import MetricSet
from verl.protocol import DataProto
from verl.single_controller.base.dispatch import CallOptions

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
class RoleHandle:
    """What the dataflow holds of a role: verbs over the worker group that plays it.

    Args:
        name: ``actor``, ``ref``, ``critic``, ``rollout``, ... or a recipe's own.
        kind: what may be asked of it.
        group: a worker group whose methods are bound by `register`.
        mini_batch_size: prompts per optimizer step, over all ranks (trainable roles).
        epochs, shuffle, seed: how `train` goes through a batch.
    """

    name: str
    kind: RoleKind
    group: Any
    mini_batch_size: int = 0
    epochs: int = 1
    shuffle: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in get_args(RoleKind):
            raise ConfigError(f"unknown kind of the role {self.name!r}", got=self.kind, allowed=get_args(RoleKind))

    def infer(self, batch: DataProto, options: CallOptions) -> DataProto:
        """Forward passes: a batch with the outputs that ``options`` names, each (B, T) float32."""
        self._require("trainable", "frozen")
        return self.group.infer(batch, options)

    def train(self, mini_batch: DataProto, options: CallOptions) -> MetricSet:
        """One optimizer step; its metrics over all ranks, each by its own reduction."""
        self._require("trainable")
        merged = MetricSet()
        for part in self.group.train(mini_batch, options):
            merged.merge(part)
        return merged

    def score(self, batch: DataProto) -> DataProto:
        """``rm_scores`` (B, T) float32, each on the last sampled token of its row."""
        self._require("scorer")
        return self.group.compute_rm_score(batch)

    @property
    def num_parts(self) -> int:
        """Parts into which a mini-batch is cut: one per data-parallel rank."""
        return self.group.data_parallel_size("model")

    def _require(self, *kinds: RoleKind) -> None:
        if self.kind not in kinds:
            raise WorkerError(f"the role {self.name!r} is {self.kind}", allowed=f"a role that is {' or '.join(kinds)}")


class Roles(Mapping[str, RoleHandle]):
    """Name -> handle. Keys are names or `Role` members.

    Example:
        >>> roles = Roles()
        >>> roles.add(RoleHandle("actor", "trainable", group)); roles.add(RoleHandle("prm", "trainable", other))
        >>> roles["actor"].infer(batch, options); "ref" in roles; roles.of_kind("trainable")
    """

    def __init__(self) -> None:
        self._handles: dict[str, RoleHandle] = {}

    def add(self, handle: RoleHandle) -> None:
        """Add a role; its name must be new."""
        if handle.name in self._handles:
            raise ConfigError(f"the role {handle.name!r} exists already", fix="Give yours another name.")
        self._handles[handle.name] = handle

    def of_kind(self, kind: RoleKind) -> dict[str, RoleHandle]:
        """The roles of one kind, in the order in which they were added."""
        return {name: handle for name, handle in self._handles.items() if handle.kind == kind}

    def groups(self) -> list[Any]:
        """The worker groups behind the roles, each once."""
        return list({id(handle.group): handle.group for handle in self._handles.values()}.values())

    def __getitem__(self, role: Role | str) -> RoleHandle:
        name = str(role)
        if name not in self._handles:
            raise WorkerError(
                f"this run has no role {name!r}", allowed=sorted(self._handles), fix=suggest(name, self._handles)
            )
        return self._handles[name]

    def __contains__(self, role: object) -> bool:
        return str(role) in self._handles

    def __iter__(self) -> Iterator[str]:
        return iter(self._handles)

    def __len__(self) -> int:
        return len(self._handles)
