"""Decoding with CUDA graphs: fixed shapes over a paged cache, one replay per step.

Prompts go through the same packed passes as in `pool_runner`. Decoding runs over buffers whose addresses never change,
for a few batch sizes; each size is captured once, the first time it is needed, and rows that are missing to the next
size work on a scratch page. Off CUDA, and where plain operations must do the attention, the same step runs without a
graph: so the bookkeeping is tested without a GPU.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from verl.errors import RolloutError
from verl.rollout.hf.attention import PrefillPlan, StepPlan
from verl.rollout.hf.kv_pool import KVShape
from verl.rollout.hf.native import NativeModel
from verl.rollout.hf.paged_attention import PagedAttention, StepBuffers, TorchPagedAttention
from verl.rollout.hf.paged_cache import PAGE, PagedCache, Seat, pages_for
from verl.rollout.hf.rows import Chunk, Prompt, Row

BATCH_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
HOST_CACHE_BYTES = 1 << 30
FREE_SHARE = 0.8
"""Part of the device's free memory that the cache may take where no size is given."""


@dataclass(frozen=True)
class GraphPolicy:
    """Sizes of a `GraphRunner`.

    Args:
        max_rows: rows that run at once.
        max_tokens: longest sequence.
        cache_bytes: memory of the cache; None: what is needed at most, within `FREE_SHARE` of the free memory.
        pass_tokens: prompts of more tokens than that are spread over several forward passes.
        use_graphs: None: on CUDA.
    """

    max_rows: int
    max_tokens: int
    cache_bytes: int | None = None
    pass_tokens: int = 16384
    use_graphs: bool | None = None


class Graph:
    """One captured decoding step for ``rows`` rows."""

    def __init__(self, graph: torch.cuda.CUDAGraph, logits: torch.Tensor):
        self.graph, self.logits = graph, logits

    def __call__(self) -> torch.Tensor:
        self.graph.replay()
        return self.logits


class GraphRunner:
    """Runs a written-out decoder over a paged cache; see `Runner` for the methods."""

    can_chunk = True
    keeps_prompts = True

    def __init__(self, native: NativeModel, shape: KVShape, policy: GraphPolicy):
        self.native, self.shape, self.policy = native, shape, policy
        self.prefill_tokens = self.decode_tokens = self.graphs_captured = 0
        on_cuda = shape.device.type == "cuda"
        self.use_graphs = on_cuda if policy.use_graphs is None else policy.use_graphs and on_cuda
        self._sizes = sorted({*(s for s in BATCH_SIZES if s < policy.max_rows), policy.max_rows})
        self._rows: list[Row] = []
        self._promised: dict[Row, int] = {}
        self._cache: PagedCache | None = None
        self._graphs: dict[int, Graph] = {}

    # ---- what the scheduler and the sampler see -----------------------------------------------------------------

    @property
    def rows(self) -> list[Row]:
        return self._rows

    @property
    def num_cache_bytes(self) -> int:
        return 0 if self._cache is None else self._cache.num_bytes

    @property
    def capacity(self) -> int:
        return (self._ready_cache().num_pages - 1) * PAGE

    def reserve(self, row: Row) -> bool:
        """Keep the pages that ``row`` may need at most; False if there are not enough at the moment."""
        cache = self._ready_cache()
        need = pages_for(row.prompt.length + row.budget)
        if need > cache.num_available:
            return False
        self._promised[row] = need
        cache.promise(need)
        return True

    def step(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        parts = []
        with torch.inference_mode():
            if self._rows:
                parts.append(self._decode())
            parts += [self._prefill(together) for together in self._passes(chunks)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def place(self, admitted: Sequence[tuple[Prompt, Sequence[Row]]]) -> None:
        cache = self._ready_cache()
        with torch.inference_mode():
            for prompt, rows in admitted:
                promised = sum(self._promised.pop(row, 0) for row in rows)
                # The last token that is drawn is never put in.
                lengths = [prompt.length + len(row.tokens) + row.budget - 1 for row in rows]
                for row, seat in zip(rows, cache.seat(prompt.pieces, lengths, promised)):
                    row.cell = seat
                    self._take_slot(row, seat)

    def remove(self, rows: Sequence[Row]) -> None:
        cache = self._cache
        if cache is None:
            return  # cleared: nobody holds anything
        for row in rows:
            if row in self._promised:
                cache.promise(-self._promised.pop(row))
            if isinstance(row.cell, Seat):
                cache.leave(row.cell)
                row.cell = None
                self._leave_slot(self._rows.index(row))

    def clear(self) -> None:
        for row in self._rows:
            row.cell = None
        self._rows, self._promised = [], {}
        # Graphs hold the addresses of the cache: they go with it.
        self._graphs, self._cache = {}, None

    def refresh(self) -> None:
        self.native.refresh()

    def release(self) -> None:
        self.native.release()

    # ---- the cache and the tables -------------------------------------------------------------------------------

    def _ready_cache(self) -> PagedCache:
        if self._cache is None:
            with torch.inference_mode(False):  # ordinary tensors, which may be written in and out of that mode
                self._allocate()
        assert self._cache is not None
        return self._cache

    def _allocate(self) -> None:
        s, rows, device = self.shape, self.policy.max_rows, self.shape.device
        width = pages_for(self.policy.max_tokens)
        page_bytes = s.num_layers * s.num_heads * PAGE * (s.key_dim + s.value_dim) * s.dtype.itemsize
        room = self.policy.cache_bytes or _free_bytes(device)
        num_pages = min(rows * width, room // page_bytes) + 1
        if num_pages < 2:
            raise RolloutError(
                "there is no memory for the sampler's cache",
                key="actor_rollout_ref.rollout.max_num_seqs",
                got=f"{room >> 20} MB",
                allowed=f"{page_bytes * 2 >> 20} MB or more",
            )
        self._cache = PagedCache(s, num_pages)
        self._tables = torch.zeros(rows, width, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._numbers = torch.zeros(2, rows, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._step = StepBuffers(
            torch.zeros(rows, dtype=torch.int64, device=device),
            torch.zeros(rows, dtype=torch.int64, device=device),
            torch.zeros(rows, width, dtype=torch.int32, device=device),
        )
        self._lengths = np.zeros(rows, dtype=np.int64)
        self._widest = 1
        self._is_stale = True
        self._attention: type[PagedAttention] = best_attention(self._cache)

    def _take_slot(self, row: Row, seat: Seat) -> None:
        slot = len(self._rows)
        self._rows.append(row)
        self._tables[slot] = 0
        self._tables[slot, : len(seat.pages)] = torch.tensor(seat.pages, dtype=torch.int32)
        self._lengths[slot] = row.num_cached
        self._widest = max(self._widest, len(seat.pages))
        self._is_stale = True

    def _leave_slot(self, slot: int) -> None:
        last = len(self._rows) - 1
        if slot != last:
            self._rows[slot] = self._rows[last]
            self._tables[slot], self._lengths[slot] = self._tables[last], self._lengths[last]
        self._rows.pop()
        self._tables[last], self._lengths[last] = 0, 0
        self._is_stale = True

    # ---- decoding -----------------------------------------------------------------------------------------------

    def _decode(self) -> torch.Tensor:
        """(rows, V) logits, valid until the next step."""
        count = len(self._rows)
        size = next(s for s in self._sizes if s >= count)
        self._fill(count, size)
        self.decode_tokens += count
        if not self.use_graphs or self._attention is TorchPagedAttention:
            return self._forward(count, self._widest)
        if size not in self._graphs:
            self._graphs[size] = self._capture(size)
        return self._graphs[size]()[:count]

    def _fill(self, count: int, size: int) -> None:
        """Bring the buffers on the device up to date."""
        cache, lengths = self._ready_cache(), self._lengths[:count]
        for slot in np.flatnonzero(lengths % PAGE == 0):
            seat, number = self._rows[slot].cell, int(lengths[slot]) // PAGE
            assert isinstance(seat, Seat)
            if number == len(seat.pages):
                self._tables[slot, number] = cache.extend(seat)
                self._widest = max(self._widest, number + 1)
                self._is_stale = True
        self._numbers[0, :count] = torch.tensor([row.tokens[-1] for row in self._rows])
        self._numbers[1, :count] = torch.from_numpy(lengths)
        self._numbers[:, count:size] = 0
        self._step.ids[:size].copy_(self._numbers[0, :size], non_blocking=True)
        self._step.positions[:size].copy_(self._numbers[1, :size], non_blocking=True)
        if self._is_stale:
            self._step.tables.copy_(self._tables, non_blocking=True)
            self._is_stale = False
        lengths += 1

    def _forward(self, size: int, width: int | None = None) -> torch.Tensor:
        step = self._step.first(size)
        if width is not None:
            step = StepBuffers(step.ids, step.positions, step.tables[:, :width])
        return self.native.forward(step.ids, self._attention(self.native, self._ready_cache(), step))

    def _capture(self, size: int) -> Graph:
        # Two runs before: kernels are compiled and workspaces allocated outside the graph. They write the same cells.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._forward(size)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # One pool of memory for all sizes: only the newest logits are ever read.
        shared = next((g.graph.pool() for g in self._graphs.values()), None)
        # Other threads (pinned memory, monitoring) may use the device meanwhile.
        with torch.cuda.graph(graph, pool=shared, capture_error_mode="thread_local"):
            logits = self._forward(size)
        self.graphs_captured += 1
        return Graph(graph, logits)

    # ---- prompts ------------------------------------------------------------------------------------------------

    def _passes(self, chunks: Sequence[Chunk]) -> list[list[Chunk]]:
        passes: list[list[Chunk]] = []
        tokens = 0
        for chunk in chunks:
            if not passes or tokens + chunk.length > self.policy.pass_tokens:
                passes.append([])
                tokens = 0
            passes[-1].append(chunk)
            tokens += chunk.length
        return passes

    def _prefill(self, chunks: list[Chunk]) -> torch.Tensor:
        """(prompts that are now complete, V) logits."""
        plan, device = PrefillPlan.staging(chunks, self.shape), self.shape.device
        ids = torch.tensor([t for c in chunks for t in c.prompt.token_ids[c.start : c.end]], device=device)
        positions = torch.cat([torch.arange(c.start, c.end, device=device) for c in chunks])
        ends = np.cumsum([c.length for c in chunks]) - 1
        wanted = torch.tensor([e for e, c in zip(ends, chunks) if c.completes], dtype=torch.int64, device=device)
        logits = self.native(ids, positions, StepPlan([], plan), wanted)
        plan.keep()
        self.prefill_tokens += len(ids)
        return logits


def _free_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return HOST_CACHE_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int((free + unused) * FREE_SHARE)


def best_attention(cache: PagedCache) -> type[PagedAttention]:
    """Triton's where it is installed and the shapes suit it."""
    shape = cache.shape
    suits = shape.key_dim == shape.value_dim and shape.key_dim >= 16 and shape.key_dim & (shape.key_dim - 1) == 0
    if shape.device.type != "cuda" or not suits or importlib.util.find_spec("triton") is None:
        return TorchPagedAttention
    from verl.rollout.hf.kernels import TritonPagedAttention

    return TritonPagedAttention
