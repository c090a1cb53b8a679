"""One micro-batch through this rank's stages, and what is read from it per response token on the last one."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from verl.distributed.ulysses import summed
from verl.distributed.vocabulary import (
    STATISTICS,
    candidates_from_parts,
    statistics_from_parts,
    top_k_from_parts,
)
from verl.engines.forward import OF_SEVERAL_TOKENS, check_outputs, needed_candidates
from verl.engines.megatron.parallel import (
    SECTION,
    MegatronSizes,
    ParallelGroups,
    has_transformer_engine,
    import_megatron,
)
from verl.engines.megatron.replay import StageReplay
from verl.engines.packing import padded
from verl.engines.rows import MicroBatch
from verl.engines.settings import PassSettings
from verl.errors import ConfigError
from verl.models.attention import PackedPlan, Segments
from verl.models.router_replay import COLUMN, NO_RECORD


@dataclass(frozen=True)
class Part:
    """What this rank computes of a micro-batch.

    Args:
        micro: its tokens, positions and labels.
        row: the packed row as Megatron-Core's layers receive it; None where rows are padded.
        real: (tokens of a packed row,) which are no padding.
    """

    micro: MicroBatch
    row: Any = None
    real: Tensor | None = None


class StageForward:
    """Runs stages on micro-batches; the head sees only positions that predict a response token.

    Args:
        vocabulary: tokens of the model, without the rows that fill up the last rank.
        width: rows of the embedding per rank.
        packed: rows without padding, else padded to the longest.
        sequence: whether tensor-parallel ranks share the tokens between layers.
        softcap: bounds the logits; None: they are as they are.
        top_k: see `PassSettings`.

    Attributes:
        real: (tokens of this rank,) which are no padding, while a stage runs for the first time; else None.
        masks: whether routers get a mask of the padding.
        routing: None: experts are neither recorded nor replayed.
        family: of models that see, which have no stages.
    """

    family = None

    def __init__(
        self,
        kind: str,
        sizes: MegatronSizes,
        groups: ParallelGroups,
        vocabulary: int,
        width: int,
        *,
        packed: bool = False,
        sequence: bool = False,
        softcap: float | None = None,
        top_k: int = 0,
    ):
        if sizes.context > 1 and not packed:
            raise ConfigError(
                "the tokens of rows are shared only where rows are packed",
                key=f"{SECTION}.context_parallel_size",
                got=sizes.context,
                fix="Set use_remove_padding=true in the model's section, or the size to 1.",
            )
        self.kind, self.sizes, self.groups, self.softcap = kind, sizes, groups, softcap
        self._shared_by = sizes.tensor if sequence else 1
        self.passes = PassSettings(packed=packed, multiple=sizes.context * self._shared_by if packed else 1)
        self.first = groups.tensor.rank * width
        self.here = max(0, min(width, vocabulary - self.first))
        self.logits_per_token, self.listed_per_token = width, min(top_k, vocabulary)
        self.real: Tensor | None = None
        self.masks = False
        self.routing: StageReplay | None = None

    def check(self, outputs: Sequence[str], temperature: float) -> None:
        """Raise as a pass does, without one."""
        if self.routing is not None:
            outputs = [name for name in outputs if name != COLUMN]
        if self.kind == "causal_lm":
            outputs = [name for name in outputs if name not in OF_SEVERAL_TOKENS]
        check_outputs(self.kind, outputs, temperature)

    def part(self, micro: MicroBatch) -> Part:
        """What this rank computes of a micro-batch; all tokens but under context parallelism."""
        if not self.passes.packed:
            return Part(micro)
        if micro.attention is None:  # a filler
            alone = PackedPlan(Segments.separate([micro.input_ids.shape[1]], micro.input_ids.device))
            micro = padded(replace(micro, attention=alone), self.passes.multiple)
        rows = importlib.import_module("verl.engines.megatron.packed")
        num_real = micro.input_ids.shape[1] - micro.padding if len(micro.index) else 0
        context = self.groups.context
        if has_transformer_engine():
            mine, row, source = rows.fast_part(micro, context, self._shared_by)
            return Part(mine, row, (source >= 0) & (source < num_real))
        mine, row = rows.local_part(micro, context)
        length = mine.input_ids.shape[1]
        places = context.rank * length + torch.arange(length, device=mine.input_ids.device)
        return Part(mine, row, places < num_real)

    def run(self, stage: Any, part: Part) -> Tensor:
        """Hidden states of a stage; of the last one what its head gives at the chosen positions, (1, N, v)."""
        micro = part.micro
        longer = micro if part.real is not None else micro.lengthened(self._shared_by)
        ids, positions, flat_index = longer.input_ids, longer.position_ids, longer.positions
        if part.real is not None:
            real = part.real[:, None]
        else:
            real = _read_tokens(flat_index, ids.shape) & (len(micro.index) > 0)
        self.real = (self._local(real) if stage.config.sequence_parallel else real).flatten()
        options: dict[str, Any] = {"padding_mask": self._padding(stage, real)} if self.masks else {}
        if part.row is not None:
            options["packed_seq_params"] = part.row
        head = self._chosen(stage, flat_index, tuple(ids.shape)) if stage.post_process else contextlib.nullcontext()
        try:
            with head, self._replayed(stage, micro, ids.shape[1]):
                return stage(ids, positions, None, **options)
        finally:
            self.real = None

    def _replayed(self, stage: Any, micro: MicroBatch, length: int) -> AbstractContextManager[None]:
        """While the stage runs: the recorded experts of a micro-batch, as its routers see the tokens."""
        if self.routing is None:
            return contextlib.nullcontext()
        experts = micro.recorded_experts()
        if experts is None:
            return self.routing.forward(None)
        experts = experts.view(*micro.input_ids.shape, *experts.shape[1:])
        missing = experts.new_full((len(experts), length - experts.shape[1], *experts.shape[2:]), NO_RECORD)
        experts = torch.cat((experts, missing), 1).transpose(0, 1)  # Megatron-Core's tokens come first
        return self.routing.forward((self._local(experts) if stage.config.sequence_parallel else experts).flatten(0, 1))

    def experts(self, stage: Any, part: Part) -> Tensor:
        """(b, l, layers, top_k) that a stage chose just now, `NO_RECORD` where other ranks have the layer or token."""
        assert self.routing is not None, "experts are read only where they are recorded"
        micro = part.micro
        rows, length = micro.input_ids.shape
        length += -length % self._shared_by if part.row is None else 0
        shared = stage.config.sequence_parallel
        number = rows * length // (self.sizes.tensor if shared else 1)
        mine = self.routing.take(stage, number, micro.input_ids.device).unflatten(0, (-1, rows))
        if shared:
            every = mine.new_full((length, *mine.shape[1:]), NO_RECORD)
            self._local(every).copy_(mine)
            mine = every
        routed = mine.transpose(0, 1)[:, : micro.input_ids.shape[1]]
        return micro.experts_by_row(routed.flatten(0, 1))

    def _local(self, tokens: Tensor) -> Tensor:
        """(l, b) -> the part of the l that this tensor-parallel rank has."""
        return tokens.chunk(self.sizes.tensor)[self.groups.tensor.rank]

    def _padding(self, stage: Any, real: Tensor) -> Tensor:
        """(b, l) for routers; a stage behind the first wants this rank's part of the l."""
        shared = stage.config.sequence_parallel and not stage.pre_process
        return ~(self._local(real) if shared else real).T

    def read(self, output: Tensor, part: Part, outputs: Sequence[str], temperature: float) -> dict[str, Tensor]:
        """Name -> (b, T) float32, zero where no response token is; from what `run` gave on the last stage.

        Of `OF_SEVERAL_TOKENS` (b, T, K), ``top_k_ids`` as int32.

        Ranks that share the tokens of a row all have the values of all of them. Collective among these.
        """
        micro, values = part.micro, output[0].float()
        if self.kind == "value":
            named = {"values": values.squeeze(-1)}
        else:
            logits = values[:, : self.here]
            if self.softcap is not None:
                logits = torch.tanh(logits / self.softcap) * self.softcap
            if temperature != 1.0:
                logits = logits / temperature
            named = self._named(logits, micro, outputs)
        scattered = {name: micro.scatter(named[name]) for name in outputs}
        if self.groups.context.size == 1:
            return scattered
        # Every position is on one of the ranks, and 0 on the others.
        sums = {name: summed(values, self.groups.context) for name, values in scattered.items() if name != "top_k_ids"}
        ids = {name: self.groups.context.max(values) for name, values in scattered.items() if name == "top_k_ids"}
        return sums | ids

    def _named(self, logits: Tensor, micro: MicroBatch, outputs: Sequence[str]) -> dict[str, Tensor]:
        """(N, v) logits of this rank's tokens -> (N,) or (N, K) each. Collective among tensor-parallel ranks."""
        part: Any = (self.first, self.groups.tensor.group)
        named = dict(zip(STATISTICS, statistics_from_parts(logits, micro.labels, *part)))
        if "top_k_ids" in outputs or "top_k_log_probs" in outputs:
            log_probs, ids = top_k_from_parts(logits, self.listed_per_token, *part)
            named |= {"top_k_ids": ids.int(), "top_k_log_probs": log_probs}
        if "candidate_log_probs" in outputs:
            listed = needed_candidates(micro.candidates)
            named["candidate_log_probs"] = candidates_from_parts(logits, listed, *part)
        return named

    @contextlib.contextmanager
    def _chosen(self, stage: Any, flat_index: Tensor, shape: tuple[int, ...]) -> Iterator[None]:
        """Within the block the head sees (N, 1, H) instead of (l, b, H)."""
        mappings = import_megatron("tensor_parallel.mappings")

        def keep(
            _: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            hidden = inputs[0]
            if stage.config.sequence_parallel:
                # The head's own backward pass sums the gradient over ranks, so each takes its part of the tokens.
                hidden = mappings.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
            rows = flat_index % shape[1] * shape[0] + flat_index // shape[1]  # (l, b) is the transpose of (b, l)
            return (hidden.flatten(0, 1).index_select(0, rows).unsqueeze(1), *inputs[1:]), options

        handle = stage.output_layer.register_forward_pre_hook(keep, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()


def _read_tokens(flat_index: Tensor, shape: tuple[int, ...]) -> Tensor:
    """(l, b) True for each row up to its last chosen position, for its first token where it has none."""
    rows, length = shape
    lengths = torch.ones(rows, dtype=torch.long, device=flat_index.device)
    lengths = lengths.scatter_reduce(0, flat_index // length, flat_index % length + 1, "amax")
    return torch.arange(length, device=flat_index.device)[:, None] < lengths
