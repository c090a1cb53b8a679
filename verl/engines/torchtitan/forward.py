"""One micro-batch through a stage of TorchTitan's model, whose head is shared by vocabulary."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from verl import device as devices
from verl.engines.rows import MicroBatch
from verl.engines.sequence_parallel import SequenceForward, local_tokens
from verl.engines.settings import PassSettings
from verl.engines.torchtitan.model import select_sharded
from verl.errors import NotBuiltError


class TitanForward(SequenceForward):
    """See `SequenceForward`; on a stage of a pipeline what is read from a pass is read on the last one."""

    key = "context_parallel_size"
    _hidden: Tensor | None = None

    def _possible(self, passes: PassSettings) -> PassSettings:
        if passes.router_replay:
            raise NotBuiltError("replaying experts is not built yet on TorchTitan's models", key="router_replay")
        # Attention is ours (`modules`). Ranks that share the tokens of a row get equal numbers of them.
        sizes = self.model.sizes
        return replace(passes, multiple=sizes.tensor * sizes.context if passes.packed else 1)

    @contextlib.contextmanager
    def behind(self, hidden: Tensor | None) -> Iterator[None]:
        """Within the block a forward pass starts from the hidden states of the previous stage."""
        self._hidden = hidden
        try:
            yield
        finally:
            self._hidden = None

    def shape(self, micro: MicroBatch) -> tuple[int, int]:
        """Rows and tokens of the hidden states that this rank has of a micro-batch between layers."""
        rows, length = self._part(micro).input_ids.shape
        return rows, length // self.model.sizes.tensor

    def stage(self, micro: MicroBatch, hidden: Tensor | None) -> Tensor:
        """(rows, tokens, D) hidden states behind a stage without the head, as far as this rank has them: `shape`."""
        with self.behind(hidden), devices.autocast(self.device, self.dtype):
            out: Tensor = self._run(self._part(micro)).logits
        return out

    def _part(self, micro: MicroBatch) -> MicroBatch:
        """The tokens of a micro-batch that this rank computes."""
        return self._even(local_tokens(micro, self.peers) if self.peers.size > 1 else micro)

    def _even(self, micro: MicroBatch) -> MicroBatch:
        """Padded rows, and a filler, with as many tokens for each tensor-parallel rank, as packed rows have them."""
        return micro.lengthened(self.model.sizes.tensor) if micro.attention is None else micro

    def _logits(self, micro: MicroBatch) -> Tensor:
        micro = self._even(micro)
        with devices.autocast(self.device, self.dtype), select_sharded(self.head, micro.positions):
            logits = self._run(micro).logits
        # All tensor-parallel ranks take the same loss of the complete logits, so each has its part of the gradient.
        return (logits.full_tensor() if isinstance(logits, DTensor) else logits).squeeze(0)

    def _run(self, micro: MicroBatch) -> Any:
        return self.model(
            micro.input_ids,
            position_ids=micro.position_ids,
            attention_plan=micro.attention,
            hidden=self._hidden,
        )
