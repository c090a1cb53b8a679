"""The options of a worker's calls, the same for all its ranks."""

from __future__ import annotations

from dataclasses import dataclass

from verl.single_controller.base import CallOptions


@dataclass(frozen=True)
class InferOptions(CallOptions):
    """Of `ModelWorker.infer`.

    Args:
        outputs: what the forward passes compute, as `verl.engines.base.Engine.infer` names it.
    """

    outputs: tuple[str, ...] = ("log_probs",)


@dataclass(frozen=True)
class TrainOptions(CallOptions):
    """Of `ModelWorker.train`.

    Args:
        more_updates: this global step continues, so the learning-rate schedule does not advance.
        is_mini_batch: the rows are those of one optimizer step, however many: trajectories of the same sample, and
            masked ones that fill up the ranks. A caller that sends more has them cut.
    """

    more_updates: bool = False
    is_mini_batch: bool = False
