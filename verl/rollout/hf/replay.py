"""A decoding step over rows that stay where they are: recorded as a CUDA graph, replayed while the layout holds.

Small batches on a GPU are bound by the launches of a step, and a replay is one launch. A new layout runs operation by
operation first, so that one which is gone after a few steps is never recorded. Off CUDA nothing is recorded, and the
same buffers serve every step: so the bookkeeping is tested without a GPU.

Shapes: R rows of the plans, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from verl.rollout.hf.attention import DecodePlan, StepPlan
from verl.rollout.hf.native import NativeModel

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE


class Replay:
    """The next token of every row of some plans, which may advance but not change.

    Args:
        record_after: steps before it is recorded; the first ones compile and allocate what the operations need.
        pool: memory that all recordings of a runner share; only the newest is ever replayed.
    """

    def __init__(self, native: NativeModel, plans: Sequence[DecodePlan], record_after: int, pool: _POOL_HANDLE | None):
        self.native, self.plans = native, list(plans)
        self._steps_left, self._pool = record_after, pool
        count, device = sum(len(plan.rows) for plan in plans), plans[0].positions.device
        self._on_cuda = device.type == "cuda"
        self._waiting = torch.zeros(count, dtype=torch.int64, pin_memory=self._on_cuda)
        self._ids = torch.zeros(count, dtype=torch.int64, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logits: torch.Tensor | None = None

    @property
    def is_recorded(self) -> bool:
        return self._graph is not None

    def __call__(self, ids: Sequence[int]) -> torch.Tensor:
        """The newest token of each row -> (R, V) logits, valid until the next call."""
        self._waiting.copy_(torch.tensor(ids))
        self._ids.copy_(self._waiting, non_blocking=True)
        if self._graph is None and self._on_cuda and not self._steps_left:
            self._record()
        if self._graph is None or self._logits is None:
            self._steps_left -= 1 if self._steps_left else 0
            return self._forward()
        self._graph.replay()
        return self._logits

    def _forward(self) -> torch.Tensor:
        positions = torch.cat([plan.positions for plan in self.plans])
        return self.native(self._ids, positions, StepPlan(self.plans, None), None)

    def _record(self) -> None:
        graph = torch.cuda.CUDAGraph()
        # Other threads (pinned memory, monitoring) may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            self._logits = self._forward()
        self._graph = graph
