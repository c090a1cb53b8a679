"""The rows of one rank, cut into micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from verl.engines.blank_pictures import Blanks
from verl.engines.packing import computed_tokens, pack_rows, padded
from verl.engines.rows import AlignedRows, MicroBatch
from verl.engines.settings import PassSettings
from verl.metrics import MetricSet


@dataclass(frozen=True)
class RankWork:
    """This rank's rows, cut into as many micro-batches as the rank with the most has.

    Args:
        plan: rows per micro-batch; an empty list is a filler.
        num_responses: T of the widest batch of any rank.
        passes: whether a micro-batch is packed, and prompts are shared in it.
        blanks: what a micro-batch without pictures gets where other ranks have some.
    """

    rows: AlignedRows
    plan: list[list[int]]
    num_responses: int
    passes: PassSettings
    blanks: Blanks

    def micro_batches(self, device: str) -> Iterator[MicroBatch]:
        for index in self.plan:
            if self.passes.packed:
                packed = self.blanks.added(pack_rows(self.rows, index, device, self.passes.share_prompts))
                yield padded(packed, self.passes.multiple)
            else:
                yield self.blanks.added(self.rows.micro_batch(index, device))

    def waste(self, sum_over_ranks: Callable[[Tensor], Tensor]) -> MetricSet:
        """Shares of tokens: computed ones that are padding, needed ones that a shared prompt saved. Collective."""
        lengths = self.rows.lengths
        needed = sum(lengths)
        if self.passes.packed:
            computed = computed_tokens(self.rows, self.plan, self.passes.share_prompts, self.passes.multiple)
        else:
            computed = sum(len(part) * max(lengths[row] for row in part) for part in self.plan if part)
        all_needed, all_computed = sum_over_ranks(torch.tensor([needed, computed], dtype=torch.float64)).tolist()
        metrics = MetricSet()
        metrics.add("padding_waste", max(0.0, 1.0 - all_needed / all_computed) if all_computed else 0.0)
        metrics.add("prompt_sharing", max(0.0, 1.0 - all_computed / all_needed) if all_needed else 0.0)
        return metrics
