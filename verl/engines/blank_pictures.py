"""Blank pictures for ranks that have none: sharded towers are gathered by all ranks together."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from verl.engines.rows import MicroBatch
from verl.models.attention import NO_PREFIX, PackedPlan, Segments
from verl.models.vision import PlacedPicture, VisionFamily, VisionInputs


@dataclass(frozen=True)
class Blanks:
    """Gives a micro-batch a blank picture of each kind that some rank has and it has not.

    Ranks gather the tower's weights together, in the same order, forward and backward; so each calls it as often as
    any other does. No other token attends to the blank ones, and the loss does not depend on them.

    Args:
        kinds: of pictures that ranks have somewhere in the batch; none where one process holds the model.
    """

    family: VisionFamily | None
    kinds: tuple[str, ...] = ()

    def added(self, micro: MicroBatch) -> MicroBatch:
        """The micro-batch, with what is missing behind its tokens."""
        there = set() if micro.vision is None else set(micro.vision.places)
        if self.family is None or not set(self.kinds) - there:
            return micro
        blanks = [self.family.smallest(kind) for kind in self.family.kinds if kind in self.kinds and kind not in there]
        ids: list[int] = []
        placed: list[PlacedPicture] = []
        for blank in blanks:
            placed.append(PlacedPicture(blank, ((len(ids), sum(blank.runs)),)))
            ids += [self.family.token_id(blank.kind)] * sum(blank.runs)
        micro = _with_axes(micro, self.family)
        grow = _below_rows if micro.attention is None else _behind_row
        grown, at = grow(micro, torch.tensor(ids))
        added = VisionInputs.of(self.family, [(p, at) for p in placed], micro.input_ids.device)
        return replace(grown, vision=_joined(grown.vision, added))


def _with_axes(micro: MicroBatch, family: VisionFamily) -> MicroBatch:
    """A micro-batch of text alone, with the axes of one that has pictures."""
    if family.axes == 1 or micro.position_ids.dim() == 3:
        return micro
    return replace(micro, position_ids=micro.position_ids.expand(1 + family.axes, *micro.position_ids.shape))


def _behind_row(micro: MicroBatch, ids: Tensor) -> tuple[MicroBatch, int]:
    """The tokens as a segment of their own behind a packed row, and where they begin."""
    assert isinstance(micro.attention, PackedPlan), "pictures are placed before ranks share a sequence"
    old = micro.attention.segments
    segments = Segments((*old.lengths, len(ids)), (*old.prefix, NO_PREFIX), old.device)
    grown = replace(
        micro,
        input_ids=torch.cat((micro.input_ids, ids[None].to(micro.input_ids.device)), 1),
        position_ids=F.pad(micro.position_ids, (0, len(ids))),
        attention=replace(micro.attention, segments=segments),
        padding=micro.padding + len(ids),
    )
    return grown, old.num_tokens


def _below_rows(micro: MicroBatch, ids: Tensor) -> tuple[MicroBatch, int]:
    """The tokens as a row of their own below padded ones, and where they begin."""
    rows, width = micro.input_ids.shape
    new = max(width, len(ids))
    input_ids = F.pad(micro.input_ids, (0, new - width, 0, 1))
    input_ids[rows, : len(ids)] = ids.to(input_ids.device)
    grown = replace(
        micro,
        input_ids=input_ids,
        position_ids=F.pad(micro.position_ids, (0, new - width, 0, 1)),
        positions=micro.positions // width * new + micro.positions % width,
        vision=None if micro.vision is None else micro.vision.moved(width, new),
    )
    return grown, rows * new


def _joined(first: VisionInputs | None, second: VisionInputs | None) -> VisionInputs | None:
    """Pictures of different kinds together."""
    if first is None or second is None:
        return first or second
    return VisionInputs({**first.tensors, **second.tensors}, {**first.places, **second.places})
