"""The fast runner: packed steps over the KV cache, for every model that uses transformers' attention interface.

Rows live in blocks (see `kv_pool`). Between two steps the runner closes holes, moves groups whose own part is full to a
larger block, and splits groups that have become sparse; during a step nothing moves. Where steps are recorded (see
`replay`), rows that ended keep their place until a quarter of them has, because a new layout is a new recording.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from verl.models.attention.masked import Run
from verl.models.router_replay import ExpertRecorder
from verl.models.vision import VisionInputs, family_of, placing
from verl.rollout.hf.attention import ATTENTION_NAME, DecodePlan, PrefillPlan, StepPlan, attending
from verl.rollout.hf.fixed_rows import FixedRows
from verl.rollout.hf.kv_pool import BufferPool, Cell, Group, KVBlock, KVShape, capacity_class, move_groups, regroup
from verl.rollout.hf.native import NativeModel
from verl.rollout.hf.replay import Replay
from verl.rollout.hf.rows import Chunk, Prompt, Row
from verl.rollout.hf.runner import UNLIMITED, BorrowedModel
from verl.rollout.hf.seen import Features

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Group widths that blocks come in; a prompt with more rows gets several groups."""
SPARSE = 0.7
"""A block with fewer living rows than this part of its slots is looked at for splitting."""
WORTH_MOVING = 0.75
"""Groups move if the attention cost falls below that part."""
IDLE = 0.25
"""Part of the rows of a recorded step that may have ended."""
FREE_SHARE = 0.4
"""Part of the device's free memory for rows where no size is given; moving a block takes as much once more."""


@dataclass(frozen=True)
class PoolPolicy:
    """How rows are laid out.

    Args:
        min_shared: prompts of at least that many tokens are kept once for all rows of a group; shorter ones are copied
            into each row, which saves two matrix products a layer.
        pass_tokens: prompts of more tokens than that are spread over several forward passes; on CPU larger
            activations only leave the cache.
        record_after: steps that a layout must last to be recorded; None: none is.
        cache_bytes: memory of the cache; None: what is needed, on CUDA within `FREE_SHARE` of what is free.
        exact: every row alone, its extent a function of its own length, tokens padded to a multiple of
            ``row_multiple``, linear layers by `FixedRows`: results are then bitwise independent of the batch.
    """

    min_shared: int = 24
    pass_tokens: int = 1024
    record_after: int | None = None
    cache_bytes: int | None = None
    exact: bool = False
    row_multiple: int = 8


class PoolRunner:
    """Runs a causal language model over a pool of keys and values; see `Runner` for the methods.

    Args:
        model: used during a step only, and left as it was.
        shape: what the model caches per token.
        native: computes the same as ``model``, faster; None where there is no such thing.
    """

    can_chunk = True
    keeps_prompts = True
    recorder: ExpertRecorder | None = None
    is_interrupted: Callable[[], bool] | None = None

    def __init__(
        self,
        model: PreTrainedModel,
        shape: KVShape,
        policy: PoolPolicy | None = None,
        native: NativeModel | None = None,
    ):
        self.model, self.shape, self.policy, self.native = model, shape, policy or PoolPolicy(), native
        self.prefill_tokens = self.decode_tokens = 0
        self.blocks: list[KVBlock] = []
        self._plans: dict[KVBlock, DecodePlan] = {}
        self._rows: list[Row] = []
        self._is_stale = False
        self._num_ended = 0
        self._alive: torch.Tensor | None = None
        self._replay: Replay | None = None
        self._recordings: Any = None
        self._limit: int | None = None
        self._promised: dict[Row, int] = {}
        self._borrowed = BorrowedModel(model, ATTENTION_NAME)
        self._pool = BufferPool(shape.dtype, shape.device)
        family = family_of(model.config)
        self.features = None if family is None else Features(model, family, self.policy.exact)
        self.sees_ahead = family is not None and family.sees_ahead
        self.can_chunk = not (self.policy.exact or self.sees_ahead)

    @property
    def num_cache_bytes(self) -> int:
        return self._pool.num_bytes

    @property
    def can_share(self) -> bool:
        return self.native is None or self.native.packs

    @property
    def num_copied_bytes(self) -> int:
        return 0 if self.native is None else self.native.num_copied_bytes

    @property
    def rows(self) -> list[Row]:
        if self._is_stale:
            self._settle()
        return [row for row in self._rows if row.cell is not None] if self._num_ended else self._rows

    def step(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        if self._is_stale or (self._num_ended and chunks) or self._is_full():
            self._settle()
        parts = []
        with torch.inference_mode() if self.native is not None else self._borrowed.ready():
            if self._replay is not None and not chunks:
                parts.append(self._replayed(self._replay))
            else:
                for number, together in enumerate(self._passes(chunks)):
                    parts.append(self._forward(together, with_rows=number == 0))
            for plan in self._plans.values():
                plan.advance()
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def place(self, admitted: Sequence[tuple[Prompt, Sequence[Row]]]) -> None:
        members: dict[KVBlock, list[tuple[Prompt, list[Row]]]] = defaultdict(list)
        for prompt, rows in admitted:
            if len(rows) == 1 or prompt.length < self.policy.min_shared or self.policy.exact:
                members[self._find(1, 0, prompt.length + 1)].append((prompt, list(rows)))
                continue
            for part in _split(rows, WIDTHS[-1]):
                width = next(w for w in WIDTHS if w >= len(part))
                members[self._find(width, prompt.length, 1)].append((prompt, part))
        with torch.inference_mode():
            for block, parts in members.items():
                block.reserve(sum(1 if block.prefix_capacity else len(rows) for _, rows in parts))
                for prompt, rows in parts:
                    _write_prompt(block, prompt, rows)
        self._is_stale = self._is_stale or bool(members)

    def remove(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._promised.pop(row, None)
            if isinstance(row.cell, Cell):
                row.cell.group.rows[row.cell.slot] = None
                row.cell.block.changed = True
                row.cell = None
                self._num_ended += 1
        self._alive = None
        self._is_stale = self._is_stale or self._replay is None or self._num_ended > IDLE * len(self._rows)

    def clear(self) -> None:
        for row in self._rows:
            row.cell = None
        self._rows, self.blocks, self._plans, self._is_stale = [], [], {}, False
        # A recording holds addresses of the cache: drop both together.
        self._replay, self._recordings, self._num_ended, self._alive = None, None, 0, None
        self._limit, self._promised = None, {}
        if self.features is not None:
            self.features.clear()
        self._pool = BufferPool(self.shape.dtype, self.shape.device)

    @property
    def capacity(self) -> int:
        return UNLIMITED if self.cache_bytes is None else self.cache_bytes // self.shape.token_bytes

    @property
    def cache_bytes(self) -> int | None:
        """What rows may take together; None: blocks grow as they need."""
        if self._limit is None:
            self._limit = self.policy.cache_bytes or _free_bytes(self.shape.device)
        return self._limit

    def reserve(self, row: Row) -> bool:
        if self.cache_bytes is None:
            return True
        need = (row.prompt.length + row.budget) * self.shape.token_bytes
        if sum(self._promised.values()) + need > self.cache_bytes:
            return False
        self._promised[row] = need
        return True

    def refresh(self) -> None:
        if self.features is not None:
            self.features.clear()
        if self.native is not None:
            self.native.refresh()

    def release(self) -> None:
        if self.native is not None:
            self.native.release()

    def _is_full(self) -> bool:
        """Whether a block has no room for one more token, or a row that ended is about to leave the model's context."""
        if any(plan.longest >= block.capacity for block, plan in self._plans.items()):
            return True
        most = self.native.max_positions if self.native is not None and self._num_ended else UNLIMITED
        return any(plan.furthest >= most for plan in self._plans.values())

    def _replayed(self, replay: Replay) -> torch.Tensor:
        """(living rows, V) logits."""
        logits = replay([row.tokens[-1] for row in self._rows])
        self.decode_tokens += len(self._rows) - self._num_ended
        if not self._num_ended:
            return logits
        if self._alive is None:
            alive = [number for number, row in enumerate(self._rows) if row.cell is not None]
            self._alive = torch.tensor(alive, device=self.shape.device)
        return logits[self._alive]

    def _passes(self, chunks: Sequence[Chunk]) -> list[list[Chunk]]:
        """Chunks of one step, cut into forward passes; running rows go with the first one."""
        passes: list[list[Chunk]] = [[]]
        tokens = len(self._rows)
        for chunk in chunks:
            if tokens and tokens + chunk.length > self.policy.pass_tokens and (passes[-1] or self._rows):
                passes.append([])
                tokens = 0
            passes[-1].append(chunk)
            tokens += chunk.length
        return passes

    def _forward(self, chunks: list[Chunk], with_rows: bool) -> torch.Tensor:
        """One pass over the model: (rows + completed prompts, V) logits."""
        rows = self._rows if with_rows else []
        plans = [self._plans[block] for block in self.blocks] if with_rows else []
        device, num_prompt = self.shape.device, sum(c.length for c in chunks)
        padding = self._missing(len(rows) + num_prompt)
        ids = [row.tokens[-1] for row in rows]
        for chunk in chunks:
            ids.extend(chunk.prompt.token_ids[chunk.start : chunk.end])
        ids.extend(ids[:1] * padding)
        positions = [plan.rotary_positions for plan in plans]
        positions += [_positions_of(chunk, device) for chunk in chunks]
        positions.append(torch.zeros(padding, dtype=torch.int64, device=device))
        pictures = self._pictures(chunks, len(rows))
        prefill = None
        if chunks:
            runs = _runs_ahead(chunks) if self.sees_ahead else ()
            prefill = PrefillPlan.staging(chunks, self.shape, same_length_only=self.policy.exact, runs=runs)
        plan = StepPlan(plans, prefill, padding, None if chunks else self.is_interrupted)
        logit_rows = self._logit_rows(len(rows), chunks)
        with nullcontext() if self.recorder is None else self.recorder.recording():
            with nullcontext(dict[str, Any]()) if pictures is None else placing(self.model, pictures) as seen:
                logits = self._logits(torch.tensor(ids, device=device), _on_axes(positions), plan, logit_rows, seen)
            self._note_experts(rows, chunks)
        if prefill is not None:
            prefill.keep()
        self.prefill_tokens += num_prompt
        self.decode_tokens += len(rows) + padding * self.policy.exact
        return logits[: len(rows) + sum(c.completes for c in chunks)]

    def _pictures(self, chunks: Sequence[Chunk], first: int) -> VisionInputs | None:
        """Features of what the chunks show, the first of which begins at token ``first`` of the pass."""
        pieces = []
        for chunk in chunks:
            if chunk.prompt.view is not None:
                pieces.append((chunk.prompt.view, chunk.start, chunk.end, first))
            first += chunk.length
        return self.features.inputs(pieces) if self.features is not None else None

    def _note_experts(self, rows: Sequence[Row], chunks: Sequence[Chunk]) -> None:
        """Leave what the pass chose with the rows and prompts whose tokens they are."""
        if self.recorder is None:
            return
        experts = self.recorder.take().cpu().numpy()
        for number, row in enumerate(rows):
            row.experts.append(experts[number : number + 1])
        end = len(rows)
        for chunk in chunks:
            chunk.prompt.experts.append(experts[end : end + chunk.length])
            end += chunk.length

    def _logits(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        plan: StepPlan,
        logit_rows: torch.Tensor | None,
        seen: Mapping[str, Any],
    ) -> torch.Tensor:
        """(T,) packed tokens, (T,) or (axes, T) positions -> (T or len(logit_rows), V)."""
        if self.native is not None:
            return self.native(ids, positions, plan, logit_rows)
        with attending(plan) as cache, FixedRows() if self.policy.exact else nullcontext():
            output = self.model(
                input_ids=ids[None],
                position_ids=positions[None] if positions.dim() == 1 else positions[:, None],
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=0 if logit_rows is None else logit_rows,
                **seen,
            )
        return output.logits[0]

    def _logit_rows(self, num_rows: int, chunks: Sequence[Chunk]) -> torch.Tensor | None:
        """Positions of the packed row whose logits are needed; None means all of them."""
        if not chunks and not self.policy.exact:
            return None
        logit_rows, end = list(range(num_rows)), num_rows
        for chunk in chunks:
            end += chunk.length
            if chunk.completes:
                logit_rows.append(end - 1)
        logit_rows.extend([0] * self._missing(len(logit_rows)))
        return torch.tensor(logit_rows, dtype=torch.int64, device=self.shape.device)

    def _missing(self, tokens: int) -> int:
        """How many more tokens the model should compute: for exactness, or for speed."""
        padded = tokens if self.native is None else self.native.rows_for(tokens)
        if self.policy.exact:
            padded += -padded % self.policy.row_multiple
        return padded - tokens

    def _settle(self) -> None:
        """Between steps: close holes, split sparse groups, make room for one more token, plan the next step."""
        with torch.inference_mode():
            for block in list(self.blocks):
                if block.changed:
                    self._tidy(block)
            for block in list(self.blocks):
                plan = self._plans.get(block)
                if block.changed or plan is None or plan.longest >= block.capacity:
                    self._grow(block)
            for block in self.blocks:
                if block.changed:
                    block.compact()
                    block.changed = False
                    self._plans.pop(block, None)
                    if block.groups:
                        self._plans[block] = DecodePlan(block, fixed=self.policy.record_after is not None)
                    else:
                        block.free()
        self.blocks = [block for block in self.blocks if block.groups]
        plans = [self._plans[block] for block in self.blocks]
        self._rows = [row for plan in plans for row in plan.rows]
        self._is_stale, self._num_ended, self._alive = False, 0, None
        if self._replay is None or self._replay.plans != plans:
            self._replay = self._new_replay(plans)

    def _new_replay(self, plans: list[DecodePlan]) -> Replay | None:
        if self.native is None or self.policy.record_after is None or not plans:
            return None
        if self._recordings is None and self.shape.device.type == "cuda":
            self._recordings = torch.cuda.graph_pool_handle()
        with torch.inference_mode():
            return Replay(self.native, plans, self.policy.record_after, self._recordings)

    def _tidy(self, block: KVBlock) -> None:
        block.compact()
        slots = len(block.groups) * block.width
        alive = block.num_alive
        if block.width == 1 or not slots or alive >= SPARSE * slots:
            return
        costs = {width: _attention_cost(block, width) for width in WIDTHS if width <= block.width}
        width = min(costs, key=lambda w: costs[w])
        if costs[width] > WORTH_MOVING * _attention_cost(block, block.width):
            return
        picks = []
        for i, group in enumerate(block.groups):
            slots_alive = [j for j, row in enumerate(group.rows) if row is not None]
            picks += [(i, part) for part in _split(slots_alive, width)]
        target = self._find(width, block.prefix_capacity, block.capacity, avoid=block)
        regroup(block, target, picks)

    def _grow(self, block: KVBlock) -> None:
        """Move the groups of which a row has no room for its next token."""
        full = [i for i, group in enumerate(block.groups) if group.longest >= block.capacity]
        if full:
            target = self._find(block.width, block.prefix_capacity, block.capacity + 1, avoid=block)
            if self._pool.is_scarce and not target.room:
                # Groups that began later follow; a target that grew for them would exist twice next to its source.
                target.reserve(sum(group.num_alive > 0 for group in block.groups))
            move_groups(block, target, full)

    def _find(self, width: int, prefix_len: int, need: int, avoid: KVBlock | None = None) -> KVBlock:
        """The tightest block with room for ``need`` own tokens, or a new one; loose fits keep the blocks few."""
        capacity, prefix = capacity_class(need), capacity_class(prefix_len) if prefix_len else 0
        loose = capacity if self.policy.exact else 2 * need + 32
        fitting = [
            b
            for b in self.blocks
            if b is not avoid
            and b.width == width
            and need <= b.capacity <= loose
            and prefix_len <= b.prefix_capacity <= (2 * prefix_len + 32 if prefix_len else 0)
        ]
        if fitting:
            return min(fitting, key=lambda b: (b.capacity, b.prefix_capacity))
        block = KVBlock(self.shape, self._pool, width, prefix, capacity)
        self.blocks.append(block)
        return block


def _write_prompt(block: KVBlock, prompt: Prompt, rows: Sequence[Row]) -> None:
    """Append groups for these rows and copy the prompt's keys and values into them."""
    if block.prefix_keys is not None and block.prefix_values is not None:
        first = block.append(Group([*rows, *([None] * (block.width - len(rows)))], prompt.length))
        keys, values = block.prefix_keys[:, first], block.prefix_values[:, first]
    else:
        first = block.append(Group([rows[0]], 0))
        for row in rows[1:]:
            block.append(Group([row], 0))
        # (L, h, rows, S, d): the same prompt into each row
        keys = block.keys[:, first : first + len(rows), :, 0].transpose(1, 2)
        values = block.values[:, first : first + len(rows), :, 0].transpose(1, 2)
    done = 0
    for key, value in prompt.pieces:
        end = done + key.shape[2]
        keys[..., done:end, :] = key if keys.dim() == 4 else key.unsqueeze(2)
        values[..., done:end, :] = value if values.dim() == 4 else value.unsqueeze(2)
        done = end


def _positions_of(chunk: Chunk, device: torch.device) -> torch.Tensor:
    """(tokens,) rotary positions, or (axes, tokens) of a prompt with pictures."""
    view = chunk.prompt.view
    if view is None or len(view.positions) == 1:
        return torch.arange(chunk.start, chunk.end, device=device)
    return view.positions[:, chunk.start : chunk.end].to(device)


def _runs_ahead(chunks: Sequence[Chunk]) -> list[Run]:
    """The tokens of pictures in complete prompts, numbered as the prompts are packed."""
    runs, start = list[Run](), 0
    for chunk in chunks:
        assert chunk.length == chunk.prompt.length, "a picture may be cut"
        for picture in () if chunk.prompt.view is None else chunk.prompt.view.placed:
            for first, count in picture.runs:
                runs.append((start + first, start + first + count, ((start, start + first + count),)))
        start += chunk.length
    return runs


def _on_axes(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """(T,) where all parts have one axis; else (axes, T), text alike on all of them."""
    axes = max(part.shape[0] if part.dim() == 2 else 0 for part in parts)
    return torch.cat([part.expand(axes, -1) if axes and part.dim() == 1 else part for part in parts], dim=-1)


def _free_bytes(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int((free + unused) * FREE_SHARE)


def _attention_cost(block: KVBlock, width: int) -> float:
    """Cells read per step if the living rows of each group were laid out in groups of ``width``."""
    groups = sum(-(-group.num_alive // width) for group in block.groups)
    # A prefix is read once per group; more queries on it cost a little more.
    return groups * (block.prefix_capacity * (1 + width / 8) + width * block.capacity)


def _split(items: Sequence, size: int) -> list[list]:
    return [list(items[i : i + size]) for i in range(0, len(items), size)]
