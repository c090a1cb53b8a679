"""One micro-batch through this rank's stages, and what is read from it per response token on the last one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from verl.distributed.vocabulary import STATISTICS, statistics_from_parts
from verl.engines.forward import check_outputs
from verl.engines.megatron.parallel import MegatronSizes, ParallelGroups, import_megatron
from verl.engines.rows import MicroBatch
from verl.engines.settings import PassSettings


class StageForward:
    """Runs stages on padded micro-batches; the head sees only positions that predict a response token.

    Args:
        vocabulary: tokens of the model, without the rows that fill up the last rank.
        width: rows of the embedding per rank.

    Attributes:
        real: (tokens of this rank,) which are no padding, while a stage runs for the first time; else None.
        masks: whether routers are told which tokens are padding.
    """

    def __init__(self, kind: str, sizes: MegatronSizes, groups: ParallelGroups, vocabulary: int, width: int):
        self.kind, self.sizes, self.groups = kind, sizes, groups
        self.passes = PassSettings(packed=False)
        self.first = groups.tensor.rank * width
        self.here = max(0, min(width, vocabulary - self.first))
        self.logits_per_token = width
        self.real: Tensor | None = None
        self.masks = False

    def check(self, outputs: Sequence[str], temperature: float) -> None:
        """Raise as a pass does, without one."""
        check_outputs(self.kind, outputs, temperature)

    def run(self, stage: Any, micro: MicroBatch) -> Tensor:
        """Hidden states of a stage; of the last one what its head gives at the chosen positions, (1, N, v)."""
        ids, positions = micro.input_ids, micro.position_ids
        missing = -ids.shape[1] % (self.sizes.tensor if stage.config.sequence_parallel else 1)
        chosen = micro.positions
        if missing:  # each tensor-parallel rank takes as many tokens
            row, column = chosen // ids.shape[1], chosen % ids.shape[1]
            chosen = row * (ids.shape[1] + missing) + column
            ids = F.pad(ids, (0, missing))
            positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        real = _read_tokens(chosen, ids.shape) & (len(micro.index) > 0)
        self.real = (self._own(real) if stage.config.sequence_parallel else real).flatten()
        padding = {"padding_mask": self._padding(stage, real)} if self.masks else {}
        try:
            if not stage.post_process:
                return stage(ids, positions, None, **padding)
            with self._chosen(stage, chosen, tuple(ids.shape)):
                return stage(ids, positions, None, **padding)
        finally:
            self.real = None

    def _own(self, tokens: Tensor) -> Tensor:
        """(l, b) -> the part of the l that this tensor-parallel rank has."""
        return tokens.chunk(self.sizes.tensor)[self.groups.tensor.rank]

    def _padding(self, stage: Any, real: Tensor) -> Tensor:
        """(b, l) for routers; a stage behind the first wants this rank's part of the l."""
        shared = stage.config.sequence_parallel and not stage.pre_process
        return ~(self._own(real) if shared else real).T

    def read(self, output: Tensor, micro: MicroBatch, outputs: Sequence[str], temperature: float) -> dict[str, Tensor]:
        """Name -> (b, T) float32, zero where no response token is; from what `run` gave on the last stage."""
        values = output[0].float()
        if self.kind == "value":
            return {"values": micro.scatter(values.squeeze(-1))}
        logits = values[:, : self.here]
        if temperature != 1.0:
            logits = logits / temperature
        statistics = statistics_from_parts(logits, micro.labels, self.first, self.groups.tensor.group)
        named = dict(zip(STATISTICS, statistics))
        return {name: micro.scatter(named[name]) for name in outputs}

    @contextlib.contextmanager
    def _chosen(self, stage: Any, chosen: Tensor, shape: tuple[int, ...]) -> Iterator[None]:
        """Within the block the head sees (N, 1, H) instead of (l, b, H)."""
        mappings = import_megatron("tensor_parallel.mappings")

        def keep(_: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
            hidden = inputs[0]
            if stage.config.sequence_parallel:
                # The head's own backward pass sums the gradient over ranks, so each takes its part of the tokens.
                hidden = mappings.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
            rows = chosen % shape[1] * shape[0] + chosen // shape[1]  # (l, b) is the transpose of (b, l)
            return (hidden.flatten(0, 1).index_select(0, rows).unsqueeze(1), *inputs[1:]), options

        handle = stage.output_layer.register_forward_pre_hook(keep, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()


def _read_tokens(chosen: Tensor, shape: tuple[int, ...]) -> Tensor:
    """(l, b) True for each row up to its last chosen position, for its first token where it has none."""
    rows, length = shape
    lengths = torch.ones(rows, dtype=torch.long, device=chosen.device)
    lengths = lengths.scatter_reduce(0, chosen // length, chosen % length + 1, "amax")
    return torch.arange(length, device=chosen.device)[:, None] < lengths
