"""Attention over the pool, plugged into the models of transformers.

A model runs on a packed row of tokens (1, T): first one token per running row, then the chunks of prompts. Its cache is
a `StepCache`, which only notes the layer, and its attention function is `pool_attention`, which sends every part of the
packed row to the plan that owns it. So the model code of any family works as it is, provided that it goes through
transformers' attention interface.

Shapes: T packed tokens, R rows of a block, F groups, n width, h KV heads, g query heads per KV head,
E cells that a row can see (prefix capacity + own capacity), d head dimension.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from verl.errors import RolloutError
from verl.models.attention.masked import AttentionVariant, Run, causal_attention, seeing_ahead
from verl.rollout.hf.kv_pool import KVBlock, KVShape
from verl.rollout.hf.rows import Chunk, Row

ATTENTION_NAME = "verl_pool"
HIDDEN = 1 << 40
"""Position of a cell that holds no token: larger than any query's."""
PADDING_LIMIT = 1.25
"""Prompts share one attention call while the longest is at most that many times the shortest."""


class PassInterrupted(Exception):
    """A forward pass was left between two layers; nothing that it computed is used."""


class UnsupportedModelError(RolloutError):
    """The model's attention or cache is not supported; the sampler falls back to transformers' cache."""


class DecodePlan:
    """One query token per row of a block.

    The indices hold while no row comes or goes; `advance` moves them to the next token.

    Args:
        fixed: every step is the same operations on the same memory, as a recorded one must be.

    Attributes:
        longest: most cached tokens in any row's own part; must stay below the block's capacity.
        furthest: largest position of a row's next token.
    """

    def __init__(self, block: KVBlock, fixed: bool = False):
        self.block = block
        self.rows: list[Row] = []
        width, heads = block.width, block.shape.num_heads
        groups, device = len(block.groups), block.shape.device
        cells: list[int] = []
        lengths: list[int] = []
        for f, group in enumerate(block.groups):
            for j, row in enumerate(group.rows):
                if row is not None:
                    self.rows.append(row)
                    cells.append(f * width + j)
                    lengths.append(row.num_cached)
        prefix = np.array([group.prefix_len for group in block.groups], dtype=np.int64)
        cell, position = np.array(cells, dtype=np.int64), np.array(lengths, dtype=np.int64)
        group_of, slot_of, head = cell // width, cell % width, np.arange(heads)
        suffix = position - prefix[group_of]
        token_of = np.zeros(groups * width, dtype=np.int64)
        token_of[cell] = np.arange(len(cell))
        # Head-major inside a group: (F, h, n), so that a group's queries meet its prefix in one matrix product.
        query = token_of.reshape(groups, 1, width) * heads + head[:, None]
        out = (group_of[:, None] * heads + head) * width + slot_of[:, None]
        write = out * block.capacity + suffix[:, None]
        grid = np.zeros(groups * width, dtype=np.int64)
        grid[cell] = position
        self.is_full = len(cell) == groups * width
        in_step = not fixed and self.is_full and bool((suffix == suffix[0]).all())
        self._column = int(suffix[0]) if in_step else None
        self.query_index, self.out_index, self.write_index, self.positions, self.grid, self.key_positions = (
            torch.from_numpy(np.ascontiguousarray(x)).to(device)
            for x in (query.ravel(), out.ravel(), write.ravel(), position, grid.reshape(groups, width),
                      _key_positions(block, prefix))
        )  # fmt: skip
        self.shifts: torch.Tensor | None = None
        if any(row.prompt.shift for row in self.rows):
            self.shifts = torch.tensor([row.prompt.shift for row in self.rows], device=device)
        self.longest, self.furthest = int(suffix.max(initial=0)), int(position.max(initial=0))
        self._masks: dict[tuple[int | None, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._row_cells = torch.from_numpy(cell).to(device)

    def advance(self) -> None:
        """Every row has one more cached token."""
        self.longest += 1
        self.furthest += 1
        if self._column is not None:
            self._column += 1
        self.positions += 1
        self.write_index += 1
        self.grid.view(-1)[self._row_cells] = self.positions
        self._masks = {}

    @property
    def rotary_positions(self) -> torch.Tensor:
        """(R,) of the next tokens: an image takes fewer positions than tokens."""
        return self.positions if self.shifts is None else self.positions + self.shifts

    def masks(self, window: int | None, per_head: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Added to the scores: 0 where a row may look, -inf elsewhere.

        Returns:
            (F * h, n * g, P) of the prefix, and (F * h * n, 1, own capacity).
        """
        if (window, per_head) not in self._masks:
            keys, queries = self.key_positions[:, None, :], self.grid[:, :, None]
            hidden = keys > queries
            if window is not None:
                hidden |= keys <= queries - window
            # A slot without a row keeps its first cell open: a softmax over nothing would be NaN.
            zeros = torch.zeros(hidden.shape, dtype=self.block.shape.dtype, device=hidden.device)
            mask = zeros.masked_fill_(hidden, float("-inf"))[:, None].expand(-1, self.block.shape.num_heads, -1, -1)
            prefix, suffix = mask.split((self.block.prefix_capacity, self.block.capacity), dim=-1)
            both = prefix.repeat_interleave(per_head, 2).flatten(0, 1), suffix.flatten(0, 2)[:, None]
            self._masks[window, per_head] = both
        return self._masks[window, per_head]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, how: AttentionVariant
    ) -> torch.Tensor:
        """Store (R, h, d) keys and values, look at everything stored; query (R, h * g, d) -> (R, h * g, d_v)."""
        block, shape = self.block, self.block.shape
        groups, heads, width = len(block.groups), shape.num_heads, block.width
        per_head = query.shape[1] // heads
        self._store(block.keys[layer, :groups], key)
        self._store(block.values[layer, :groups], value)
        keys = block.keys[layer, :groups].view(-1, block.capacity, shape.key_dim)
        values = block.values[layer, :groups].view(-1, block.capacity, shape.value_dim)
        # Rows of `query` per KV head, in the order of the block's cells.
        if self.is_full:
            cells = query.unflatten(1, (heads, -1)).unflatten(0, (groups, width)).transpose(1, 2)
            query = cells.flatten(0, 2).contiguous()
        else:
            query = query.reshape(-1, per_head, shape.key_dim).index_select(0, self.query_index)
        to_prefix, to_own = self.masks(how.window, per_head)
        scores = _scores(query, keys, to_own, how)
        capacity = block.prefix_capacity
        if block.prefix_keys is not None and block.prefix_values is not None:
            shared = query.view(groups * heads, width * per_head, shape.key_dim)
            first = _scores(shared, block.prefix_keys[layer, :groups].flatten(0, 1), to_prefix, how)
            probs = torch.cat((first.view(*scores.shape[:2], -1), scores), dim=-1).softmax(-1)
            out = torch.bmm(probs[..., capacity:], values)
            first = probs[..., :capacity].reshape(groups * heads, width * per_head, capacity)
            out += torch.bmm(first, block.prefix_values[layer, :groups].flatten(0, 1)).view_as(out)
        else:
            out = torch.bmm(scores.softmax(-1), values)  # in float32 inside, whatever the dtype
        if self.is_full:
            out = out.view(groups, heads, width, per_head, shape.value_dim).transpose(1, 2)
        else:
            out = out.index_select(0, self.out_index)
        return out.reshape(len(self.rows), heads * per_head, shape.value_dim)

    def _store(self, cells: torch.Tensor, new: torch.Tensor) -> None:
        """Put (R, h, d) into (F, h, n, own capacity, d), one token per row."""
        if self._column is not None:
            cells[:, :, :, self._column] = new.unflatten(0, (len(cells), -1)).transpose(1, 2)
        else:
            dim = cells.shape[-1]
            cells.view(-1, dim).index_copy_(0, self.write_index, new.reshape(-1, dim))


def _scores(query: torch.Tensor, keys: torch.Tensor, mask: torch.Tensor, how: AttentionVariant) -> torch.Tensor:
    """(B, Q, d) queries, (B, E, d) keys and a mask (B, 1 or Q, E) -> (B, Q, E)."""
    if how.softcap is None:
        return torch.baddbmm(mask, query, keys.transpose(1, 2), alpha=how.scaling)
    scores = torch.bmm(query, keys.transpose(1, 2)) * (how.scaling / how.softcap)
    return scores.tanh_().mul_(how.softcap).add_(mask)


def _key_positions(block: KVBlock, prefix: np.ndarray) -> np.ndarray:
    """(F, E) position in the sequence of what each cell holds or will hold; `HIDDEN` for padding of the prefix."""
    shared = np.arange(block.prefix_capacity)
    first = np.where(shared < prefix[:, None], shared, HIDDEN)
    return np.concatenate((first, prefix[:, None] + np.arange(block.capacity)), axis=1)


@dataclass
class PromptSet:
    """Chunks that attend in one call: B prompts padded to L tokens, or a single later chunk of a long prompt.

    Args:
        first, count: their tokens in the packed prefill part.
        gather: (B * L) token per cell of the padded grid, None where no padding is needed.
        scatter: (count) cell per token.
    """

    chunks: list[Chunk]
    first: int
    count: int
    longest: int
    gather: torch.Tensor | None = None
    scatter: torch.Tensor | None = None


@dataclass
class PrefillPlan:
    """The chunks of prompts of one step.

    Args:
        chunks: in packed order.
        staged: keys and values (L, h, T, d) of these tokens, filled layer by layer.
        runs: of tokens that see each other in both directions, in prompts that are not cut into chunks.
    """

    chunks: list[Chunk]
    staged: tuple[torch.Tensor, torch.Tensor] | None
    device: torch.device
    same_length_only: bool = False
    runs: Sequence[Run] = ()
    sets: list[PromptSet] = field(default_factory=list)

    def __post_init__(self) -> None:
        first = 0
        for chunks in self._split():
            lengths = [c.length for c in chunks]
            prompts = PromptSet(chunks, first, sum(lengths), max(lengths))
            if min(lengths) < prompts.longest:
                grid = np.zeros((len(chunks), prompts.longest), dtype=np.int64)
                cells = np.arange(prompts.longest) < np.array(lengths)[:, None]
                grid[cells] = np.arange(prompts.count)
                prompts.gather = torch.from_numpy(grid.ravel()).to(self.device)
                prompts.scatter = torch.from_numpy(np.flatnonzero(cells)).to(self.device)
            self.sets.append(prompts)
            first += prompts.count

    @classmethod
    def staging(
        cls, chunks: list[Chunk], shape: KVShape, same_length_only: bool = False, runs: Sequence[Run] = ()
    ) -> PrefillPlan:
        """A plan that stores keys and values in its own memory; `keep` moves them to the prompts."""
        tokens = sum(c.length for c in chunks)
        keys, values = (
            torch.empty(shape.num_layers, shape.num_heads, tokens, dim, dtype=shape.dtype, device=shape.device)
            for dim in (shape.key_dim, shape.value_dim)
        )
        return cls(chunks, (keys, values), shape.device, same_length_only, runs)

    @property
    def num_tokens(self) -> int:
        return sum(c.length for c in self.chunks)

    def keep(self) -> None:
        """Record each chunk's progress in its prompt."""
        assert self.staged is not None
        keys, values = self.staged
        first = 0
        for chunk in self.chunks:
            tokens = slice(first, first + chunk.length)
            chunk.prompt.pieces.append((keys[:, :, tokens], values[:, :, tokens]))
            chunk.prompt.num_done = chunk.end
            first = tokens.stop

    def _split(self) -> Iterator[list[Chunk]]:
        together: list[Chunk] = []
        for chunk in self.chunks:
            fits = together and not together[0].start and not chunk.start and self._fits(together, chunk)
            if together and not fits:
                yield together
                together = []
            together.append(chunk)
        if together:
            yield together

    def _fits(self, together: Sequence[Chunk], chunk: Chunk) -> bool:
        limit = 1.0 if self.same_length_only else PADDING_LIMIT
        lengths = [chunk.length, *(c.length for c in together)]
        return max(lengths) <= limit * min(lengths)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, how: AttentionVariant
    ) -> torch.Tensor:
        """Causal attention inside each prompt; (T, heads, d) in packed order -> (T, heads, d_v)."""
        if self.staged is not None:
            self.staged[0][layer] = key.transpose(0, 1)
            self.staged[1][layer] = value.transpose(0, 1)
        parts = []
        for part in self.sets:
            tokens = slice(part.first, part.first + part.count)
            out = self._attend_set(part, layer, query[tokens], key[tokens], value[tokens], how)
            parts.append(out if part.scatter is None else out.index_select(0, part.scatter))
        output = parts[0] if len(parts) == 1 else torch.cat(parts)
        return seeing_ahead(output, query, key, value, self.runs, how)

    def _attend_set(
        self,
        part: PromptSet,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        how: AttentionVariant,
    ) -> torch.Tensor:
        if part.gather is not None:
            query, key, value = (x.index_select(0, part.gather) for x in (query, key, value))
        # (B, heads, L, d)
        q, k, v = (x.unflatten(0, (len(part.chunks), part.longest)).transpose(1, 2) for x in (query, key, value))
        start = part.chunks[0].start
        if start:
            pieces = part.chunks[0].prompt.pieces
            k = torch.cat([*(piece[0][layer] for piece in pieces), k[0]], dim=-2)[None]
            v = torch.cat([*(piece[1][layer] for piece in pieces), v[0]], dim=-2)[None]
        out = causal_attention(q, k, v, how)
        return out.transpose(1, 2).flatten(0, 1)


@dataclass
class StepPlan:
    """Everything one forward pass attends to: T = rows of the blocks in order, then prompts, then padding.

    Args:
        is_interrupted: called in every layer: whether the pass ends by `PassInterrupted`. The cache takes no harm, as
            the next pass writes to the same places.
    """

    decode: list[DecodePlan]
    prefill: PrefillPlan | None
    num_padding: int = 0
    is_interrupted: Callable[[], bool] | None = None

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, how: AttentionVariant
    ) -> torch.Tensor:
        """(T, H, d), (T, h, d), (T, h, d_v) -> (T, H, d_v)."""
        if self.is_interrupted is not None and self.is_interrupted():
            raise PassInterrupted
        parts, first = [], 0
        for plan in self.decode:
            rows = slice(first, first + len(plan.rows))
            parts.append(plan.attend(layer, query[rows], key[rows], value[rows], how))
            first = rows.stop
        if self.prefill is not None:
            rows = slice(first, first + self.prefill.num_tokens)
            parts.append(self.prefill.attend(layer, query[rows], key[rows], value[rows], how))
        if self.num_padding:
            parts.append(query.new_zeros(self.num_padding, query.shape[1], value.shape[2]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class _Active(threading.local):
    plan: StepPlan | None = None
    layer: int | None = None


_active = _Active()


@contextmanager
def attending(plan: StepPlan) -> Iterator[StepCache]:
    """While open, models whose attention implementation is `ATTENTION_NAME` attend by ``plan``."""
    _active.plan = plan
    try:
        yield StepCache()
    finally:
        _active.plan = _active.layer = None


class StepCache(Cache):
    """Replaces transformers' cache; keys and values go to the pool in `pool_attention`."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        _active.layer = layer_idx
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0


def pool_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of transformers' interface: (1, H, T, d) -> (1, T, H, d_v)."""
    plan, layer = _active.plan, _active.layer
    if plan is None or layer is None:
        raise UnsupportedModelError("an attention layer ran that did not put its keys and values into the cache")
    if kwargs.get("s_aux") is not None:
        raise UnsupportedModelError("attention sinks are not supported")
    _active.layer = None
    how = AttentionVariant(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out = plan.attend(layer, q, k, v, how)
    return out.unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, pool_attention)
