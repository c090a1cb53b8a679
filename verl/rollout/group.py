"""Samplers that workers hold together: a sampling layout on the ranks of a run, and how weights get there.

A worker knows its training engine and its sampler, each with a layout of its own on the same ranks. `Sharing` checks a
sampling layout before anything is allocated, `Together` carries it out: it asks the engine for a plan of the weights'
ways, forms the tensor groups that the plan assumes, and moves the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from verl.distributed import Ranks
from verl.errors import ConfigError, NotBuiltError
from verl.rollout.hf.lockstep import LockstepSampler, loader, refuse_determinism, sampling_dtype
from verl.rollout.hf.parts import KEY, cut_weights, templates
from verl.rollout.place import SAME_PROCESS
from verl.weight_sync.resharding import Layout, ModelWeights, Plan, Weight

SAMPLER = "hf"
"""Other engines shard a model over processes of their own."""
PATIENCE = timedelta(days=1)
"""A leader may be silent as long as the tools of its conversations need; one that is gone is noticed at once."""


class Source(Protocol):
    """A training engine, as far as weights are read from it."""

    def export_weights(self) -> Iterator[tuple[str, Tensor]]: ...
    def plan_for(self, sampling: Layout, weights: ModelWeights | None = None) -> Plan | None: ...
    def shards_for(self, plan: Plan, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]: ...


@dataclass(frozen=True)
class Sharing:
    """A sampling layout that was checked.

    Args:
        rollout, model: sections of the configuration.
        device: of the workers.
        layout: tensor groups and their number.
        weights: Hugging Face name -> the weight and how a tensor group shares it.
    """

    rollout: Any
    model: Any
    device: str
    layout: Layout
    weights: Mapping[str, Weight]

    @classmethod
    def of(cls, rollout: Any, model: Any, device: str, world: int) -> Sharing | None:
        """None where every worker has a sampler of its own.

        Raises:
            ConfigError: the size does not divide the workers, or the model's heads, widths or experts.
            NotBuiltError: what does not go together with it.
        """
        size = rollout.tensor_model_parallel_size
        if size == 1 or rollout.name != SAMPLER:
            return None
        if world % size:
            fits = [n for n in range(1, world + 1) if world % n == 0]
            raise ConfigError(
                f"{world} workers do not divide into tensor groups of this size", key=KEY, got=size, allowed=fits
            )
        backend = rollout.checkpoint_engine.backend
        if backend != SAME_PROCESS:
            raise NotBuiltError(
                "samplers that workers hold together live in the workers' processes",
                key="actor_rollout_ref.rollout.checkpoint_engine.backend",
                got=backend,
                allowed=[SAME_PROCESS],
                fix=f"Leave it out, or set {KEY} to 1.",
            )
        refuse_determinism(rollout.full_determinism)
        weights = cut_weights(loader(rollout, model, device), size)
        return cls(rollout, model, device, Layout(tensor=size, data=world // size), weights)

    def on(self, ranks: Ranks, source: Source | None) -> Together:
        """Form the groups on the ranks of a run. Collective.

        Args:
            source: the engine whose weights are sampled with; None: those of the model's folder.
        """
        plan = None if source is None else source.plan_for(self.layout, templates(self.weights))
        if plan is not None and not brings(plan, self.weights):
            plan = None
        places = self.layout.coordinates() if plan is None else plan.places
        mine = Ranks()
        for replica in range(self.layout.data):
            members = np.flatnonzero(places.replica == replica)
            members = members[np.argsort(places.tensor[members])].tolist()
            group = dist.new_group(members, timeout=PATIENCE)
            if ranks.rank in members:  # a process group numbers its processes by their rank, whatever their place
                order = [sorted(members).index(member) for member in members]
                mine = Ranks(members.index(ranks.rank), len(members), group, order)
        sampler = LockstepSampler.with_part(self.rollout, self.model, self.device, mine)
        return Together(self, sampler, int(places.replica[ranks.rank]), plan)


def brings(plan: Plan, weights: Mapping[str, Weight]) -> bool:
    """Whether a plan brings the parts that samplers take: an engine may describe a weight as cut in another way."""
    ranks = plan.sampling.tensor
    arriving = {name: (entry.target.axis, entry.target.bounds) for _, name, entry in plan.expanded()}
    return arriving == {name: weight.bounds(ranks) for name, weight in weights.items()}


@dataclass(frozen=True)
class Together:
    """This worker's place in a sampling layout.

    Args:
        sampler: this rank's part.
        replica: number of its tensor group.
        plan: the weights' ways from the training layout; None where the engine gives whole weights only, one after the
            other, of which each rank keeps its part.
    """

    sharing: Sharing
    sampler: LockstepSampler
    replica: int
    plan: Plan | None

    def weights(self, source: Source) -> Iterator[tuple[str, Tensor]]:
        """What this rank's sampler takes of an engine's weights. Collective."""
        if self.plan is None:
            return source.export_weights()
        return source.shards_for(self.plan, sampling_dtype(self.sharing.rollout, self.sharing.device))
