"""What the dataflow holds of the roles of a run: verbs over the worker groups that play them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import get_args

from verl.errors import ConfigError, WorkerError, suggest
from verl.metrics import MetricSet
from verl.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto
from verl.single_controller.base import Role, RoleKind, WorkerGroup, by_rank, collected
from verl.workers.model import ModelRole, ModelWorker
from verl.workers.options import InferOptions, TrainOptions
from verl.workers.reward_model import RewardModelWorker
from verl.workers.sampling import SamplingWorker


@dataclass(frozen=True)
class RoleHandle:
    """What the dataflow holds of a role: verbs over the worker group that plays it.

    Args:
        name: ``actor``, ``ref``, ``critic``, ``rollout``, ... or a recipe's own.
        kind: which calls it takes.
        group: the workers that play it; `collected` and `by_rank` run a method of their class.
        mini_batch_size: prompts per optimizer step, over all ranks (trainable roles).
        epochs, shuffle, seed: how `train` goes through a batch.
    """

    name: str
    kind: RoleKind
    group: WorkerGroup
    mini_batch_size: int = 0
    epochs: int = 1
    shuffle: bool = False
    seed: int = 0

    @classmethod
    def of(cls, role: ModelRole, group: WorkerGroup) -> RoleHandle:
        """What the dataflow holds of a model, over the group that plays its role."""
        kind = role.role_kind or ("frozen" if role.optim is None else "trainable")
        return cls(role.name, kind, group, role.mini_batch_size, role.epochs, role.shuffle, role.shuffle_seed)

    def __post_init__(self) -> None:
        if self.kind not in get_args(RoleKind):
            raise ConfigError(f"unknown kind of the role {self.name!r}", got=self.kind, allowed=get_args(RoleKind))

    def infer(self, batch: DataProto, options: InferOptions) -> DataProto:
        """Forward passes: a batch with the outputs that ``options`` names, each (B, T) float32."""
        self._require("trainable", "frozen")
        padded, pad = pad_dataproto_to_divisor(batch, self.num_parts)
        return unpad_dataproto(collected(self.group, ModelWorker.infer)(padded, options), pad)

    def train(self, mini_batch: DataProto, options: TrainOptions) -> MetricSet:
        """One optimizer step; its metrics over all ranks, each by its own reduction."""
        self._require("trainable")
        merged = MetricSet()
        for part in by_rank(self.group, ModelWorker.train)(mini_batch, options):
            merged.merge(part)
        return merged

    def score(self, batch: DataProto) -> DataProto:
        """``rm_scores`` (B, T) float32, each on the last sampled token of its row."""
        self._require("scorer")
        return collected(self.group, RewardModelWorker.compute_rm_score)(batch)

    def sample(self, prompts: DataProto) -> DataProto:
        """What the agent loop of every row makes of it: responses, masks and the sampler's own log-probs."""
        self._require("sampler")
        return collected(self.group, SamplingWorker.generate_sequences)(prompts)

    @property
    def num_parts(self) -> int:
        """Parts into which a batch is cut: one per data-parallel rank."""
        return self.group.data_parallel_size("rollout" if self.kind == "sampler" else "model")

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

    def groups(self) -> list[WorkerGroup]:
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
