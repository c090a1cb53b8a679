"""What the dataflow holds of a role: a handle with verbs, over the worker group that plays it.

A recipe adds a role by adding a handle under a new name; it neither adds a worker class nor touches the loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl.errors import WorkerError
from verl.metrics import MetricSet
from verl.protocol import DataProto
from verl.single_controller.base import Roles
from verl.single_controller.base.roles import RoleKind

# Upstream's RPC names of the known roles: what users' worker subclasses override is what the loop calls.
_INFER = {"actor": "compute_log_prob", "ref": "compute_ref_log_prob", "critic": "compute_values"}
_TRAIN = {"actor": "update_actor", "critic": "update_critic"}


@dataclass(frozen=True)
class RoleHandle:
    """One role and the worker group behind it; several roles may share a group (a colocated actor and reference).

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

    def infer(self, batch: DataProto, outputs: tuple[str, ...]) -> DataProto:
        """Forward passes: a batch with ``outputs``, each (B, T) float32."""
        self._require("trainable", "frozen")
        request = replace_meta(batch, outputs=list(outputs))
        return getattr(self.group, _INFER.get(self.name, "infer_batch"))(request)

    @property
    def num_parts(self) -> int:
        """Parts into which a mini-batch is cut: one per data-parallel rank."""
        return self.group.data_parallel_size(self.name if self.name in _TRAIN else "model")

    def train(self, mini_batch: DataProto, more_updates: bool) -> MetricSet:
        """One optimizer step; ``more_updates`` keeps the learning-rate schedule where it is."""
        self._require("trainable")
        method = getattr(self.group, _TRAIN.get(self.name, "train_mini_batch"))
        return merge_ranks(method(replace_meta(mini_batch, more_updates=more_updates)))

    def score(self, batch: DataProto) -> DataProto:
        """``rm_scores`` (B, T) float32, each on the last sampled token of its row."""
        self._require("scorer")
        return self.group.compute_rm_score(batch)

    def _require(self, *kinds: RoleKind) -> None:
        if self.kind not in kinds:
            raise WorkerError(f"the role {self.name!r} is {self.kind}", allowed=f"a role that is {' or '.join(kinds)}")


def add_role(roles: Roles, handle: RoleHandle) -> RoleHandle:
    """Put a handle under its own name."""
    roles.add(handle.name, handle, handle.kind)
    return handle


def distinct_groups(roles: Roles) -> list[Any]:
    """The worker groups behind the roles, each once."""
    return list({id(handle.group): handle.group for handle in roles.values()}.values())


def replace_meta(batch: DataProto, **changes: Any) -> DataProto:
    """The same rows under changed meta information; nothing is copied."""
    return DataProto(batch.batch, batch.non_tensor_batch, {**batch.meta_info, **changes})


def merge_ranks(parts: list[MetricSet]) -> MetricSet:
    """Metrics of one role's update from all its ranks, each by its own reduction."""
    merged = MetricSet()
    for part in parts:
        merged.merge(part)
    return merged
