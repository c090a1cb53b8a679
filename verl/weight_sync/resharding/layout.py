"""Who stands where: the ranks of a run as a grid of tensor, pipeline, data and expert coordinates.

A training layout and a sampling layout share the same ranks. Which sampling coordinates a rank gets is free, and
decides how much of what a rank trains it can keep for sampling (HybridFlow, section 5.3): `zero_redundancy` keeps all.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from verl.errors import ConfigError

Indices: TypeAlias = npt.NDArray[np.int64]

MEGATRON, HYBRIDFLOW = "tp-dp-pp", "tp-pp-dp"
ORDERS = (MEGATRON, HYBRIDFLOW)


@dataclass(frozen=True)
class Coordinates:
    """The place of every rank; all arrays are ``(world,)`` and hold one coordinate per rank.

    ``replica`` counts copies of the dense weights, ``expert_replica`` copies of the experts: inside one replica every
    piece of every weight is held at least once.
    """

    tensor: Indices
    stage: Indices
    replica: Indices
    expert: Indices
    expert_tensor: Indices
    expert_replica: Indices

    def taken(self, ranks: Indices) -> Coordinates:
        """Rank ``i`` gets the place that number ``ranks[i]`` has here."""
        return Coordinates(**{name: values[ranks] for name, values in vars(self).items()})


@dataclass(frozen=True)
class Layout:
    """``tensor`` x ``pipeline`` x ``data`` ranks; tensor-parallel peers have consecutive ranks.

    Args:
        tensor: ranks that share each layer.
        pipeline: stages, of consecutive layers.
        data: copies of the model.
        expert: ranks over which the experts of a layer are divided (they are taken from the data-parallel ones, and
            from the tensor-parallel ones as far as ``expert_tensor`` is smaller).
        expert_tensor: ranks that share each expert; null: ``tensor``.
        order: which coordinate changes fastest from rank to rank: Megatron-Core's ``tp-dp-pp``, or the paper's
            ``tp-pp-dp`` with whole copies on consecutive ranks.
        virtual: runs of layers per stage (the interleaved schedule).
        depths: (pipeline * virtual,) layers of each run in the order of the model, the ``g * pipeline + s``-th the
            g-th of stage s; null: all runs have as many.

    Raises:
        ConfigError: sizes that are not positive, an unknown order, or experts that do not divide the ranks of a stage.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: int = 1
    expert_tensor: int | None = None
    order: str = MEGATRON
    virtual: int = 1
    depths: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        sizes = {"tensor": self.tensor, "pipeline": self.pipeline, "data": self.data, "expert": self.expert}
        for name, size in sizes.items():
            if size < 1:
                raise ConfigError("a parallel size is at least 1", key=name, got=size)
        if self.order not in ORDERS:
            raise ConfigError("unknown order of ranks", key="order", got=self.order, allowed=ORDERS)
        if self.tensor * self.data % (self.expert * self.expert_tensor_size):
            raise ConfigError(
                f"{self.expert} x {self.expert_tensor_size} ranks per copy of the experts do not divide the "
                f"{self.tensor * self.data} ranks of a stage",
                key="expert",
                got=self.expert,
                allowed=f"sizes whose product with expert_tensor={self.expert_tensor_size} divides them",
            )

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.tensor * self.pipeline * self.data

    @property
    def expert_tensor_size(self) -> int:
        """Ranks that share each expert."""
        return self.tensor if self.expert_tensor is None else self.expert_tensor

    def layers_of(self, stage: int, layers: int) -> list[int]:
        """The layers of a stage, of a model that has ``layers``.

        Raises:
            ConfigError: they do not divide, or are not as many as those of the runs.
        """
        runs = self.pipeline * self.virtual
        depths = self.depths or (layers // runs,) * runs
        if sum(depths) != layers or len(depths) != runs:
            raise ConfigError(
                f"{layers} layers do not divide into {runs} runs of {self.depths or 'one length'}",
                key="pipeline",
                got=runs,
                allowed=[n for n in range(1, layers + 1) if layers % n == 0],
            )
        ends = list(itertools.accumulate(depths))
        return [n for run in range(stage, runs, self.pipeline) for n in range(ends[run] - depths[run], ends[run])]

    def coordinates(self) -> Coordinates:
        """The place of ranks 0, 1, ... in the order of this layout."""
        ranks = np.arange(self.world)
        tensor, rest = ranks % self.tensor, ranks // self.tensor
        if self.order == MEGATRON:
            data, stage = rest % self.data, rest // self.data
        else:
            stage, data = rest % self.pipeline, rest // self.pipeline
        return self.place(tensor, stage, data)

    def place(self, tensor: Indices, stage: Indices, data: Indices) -> Coordinates:
        """Coordinates from the three of the dense weights; experts are spread over the ranks of a stage."""
        within = tensor + self.tensor * data
        shared, rest = within % self.expert_tensor_size, within // self.expert_tensor_size
        return Coordinates(tensor, stage, data, rest % self.expert, shared, rest // self.expert)

    def __str__(self) -> str:
        experts = f"-e{self.expert}" if self.expert > 1 else ""
        return f"t{self.tensor}-p{self.pipeline}-d{self.data}{experts}"


def divides(training: Layout, sampling: Layout) -> bool:
    """Whether every sampling shard is made of whole training shards."""
    even = training.virtual == sampling.virtual == 1 and training.depths is sampling.depths is None
    runs = sampling.pipeline == 1 or even
    return runs and training.tensor % sampling.tensor == 0 and training.pipeline % sampling.pipeline == 0


def zero_redundancy(training: Layout, sampling: Layout) -> Coordinates:
    """Sampling coordinates under which each rank's training shard is part of its sampling shard (section 5.3).

    Sampling groups take ranks at stride ``t / t_g`` (and ``p / p_g`` stages); the ranks between them, consecutive ones,
    are the micro data-parallel group that gathers.

    Raises:
        ConfigError: the sampling sizes do not divide the training sizes, or the numbers of ranks differ.
    """
    same_world(training, sampling)
    if not divides(training, sampling):
        raise ConfigError(
            "sampling sizes that divide the training sizes are needed to keep every training shard",
            key="sampling layout",
            got=str(sampling),
            allowed=f"tensor sizes that divide {training.tensor} and pipeline sizes that divide {training.pipeline}",
            fix="Any other pair can be planned with assignment='matched'.",
        )
    here = training.coordinates()
    per_tensor, per_stage = training.tensor // sampling.tensor, training.pipeline // sampling.pipeline
    micro = here.stage % per_stage * per_tensor + here.tensor % per_tensor
    data = here.replica * (per_tensor * per_stage) + micro
    return sampling.place(here.tensor // per_tensor, here.stage // per_stage, data)


def same_world(training: Layout, sampling: Layout) -> None:
    """Raises ConfigError unless both layouts have the same ranks."""
    if training.world != sampling.world:
        raise ConfigError(
            f"both layouts stand on the same ranks, but {training} has {training.world} and {sampling} has "
            f"{sampling.world}",
            key="sampling layout",
            fix=f"Choose tensor x pipeline x data = {training.world}.",
        )
