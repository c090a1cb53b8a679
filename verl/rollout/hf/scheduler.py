"""Which waiting requests get a slot, and which tokens of which prompts are computed next.

First come, first served within a priority. A request needs a slot (``max_num_seqs`` of them) and its prompt; a prompt
that is being computed, or is kept because more of its requests wait, costs nothing again.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from verl.rollout.hf.rows import Chunk, Prompt, Row
from verl.rollout.hf.seen import PromptView


@dataclass
class Admission:
    """The work of one step.

    Args:
        chunks: pieces of prompts to compute.
        joining: prompts that were computed earlier, with rows that take their first token from the kept logits.
    """

    chunks: list[Chunk] = field(default_factory=list)
    joining: list[Prompt] = field(default_factory=list)


class Scheduler:
    """The waiting line, and the prompts that are computed for it.

    Args:
        max_num_seqs: slots.
        max_num_batched_tokens: tokens of one step, running rows included; a prompt that cannot be cut may exceed it.
        can_chunk: whether a prompt may be computed in pieces.
        keeps_prompts: whether a computed prompt can serve requests that are admitted later.
        share: whether requests with the same token ids are served by one computation.
        reserve: reserves cache space for a row; while it returns False, no other row is admitted.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        *,
        can_chunk: bool = True,
        keeps_prompts: bool = True,
        share: bool = True,
        reserve: Callable[[Row], bool] = lambda row: True,
    ):
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.can_chunk, self.keeps_prompts, self.share = can_chunk, keeps_prompts, share
        self.reserve = reserve
        self.prompt_hits = 0
        self._line: list[tuple[int, int, Row]] = []
        self._arrival = itertools.count()
        self._first = 0
        self._known: dict[tuple[tuple[int, ...], bytes], Prompt] = {}
        self._computing: list[Prompt] = []

    @property
    def pending(self) -> list[Row]:
        """Rows without a first token: those whose prompt is being computed, then the line."""
        line = [row for _, _, row in sorted(self._line, key=lambda entry: entry[:2]) if row.state == "waiting"]
        return [row for prompt in self._computing for row in prompt.rows] + line

    @property
    def is_empty(self) -> bool:
        return not self._computing and all(row.state != "waiting" for _, _, row in self._line)

    def prompt_for(self, token_ids: tuple[int, ...], view: PromptView | None = None) -> Prompt:
        """The prompt that waits or is being computed with these tokens and pictures, or a new one."""
        prompt = Prompt(token_ids, view=view)
        return self._known.setdefault(prompt.identity, prompt) if self.share else prompt

    def add(self, row: Row) -> None:
        row.state = "waiting"
        row.prompt.num_waiting += 1
        heapq.heappush(self._line, (row.request.priority, next(self._arrival), row))

    def put_back(self, rows: Sequence[Row]) -> None:
        """Queue rows that were interrupted, before all others of their priority."""
        self._first -= len(rows)
        for number, row in enumerate(rows, start=self._first):
            row.state = "waiting"
            row.prompt.num_waiting += 1
            heapq.heappush(self._line, (row.request.priority, number, row))

    def leave(self, row: Row) -> None:
        """Take back a row that has no token yet."""
        if row.state == "waiting":
            row.prompt.num_waiting -= 1
        elif row.state == "admitted":
            row.prompt.rows.remove(row)
        row.state = "ended"
        self._tidy(row.prompt)

    @property
    def is_computing(self) -> bool:
        """Whether rows were admitted whose prompt is not complete."""
        return bool(self._computing)

    def admit(self, num_running: int, only_begun: bool = False) -> Admission:
        """Fill the free slots and the rest of the step's token budget.

        Args:
            only_begun: continue the prefill of admitted prompts, and admit no further row.
        """
        admission = Admission()
        budget = self.max_num_batched_tokens - num_running
        for prompt in self._computing:
            budget -= _next_chunk(prompt, budget, admission)
        slots = self.max_num_seqs - num_running - sum(len(prompt.rows) for prompt in self._computing)
        while self._line and slots > 0 and not only_begun:
            row = self._line[0][2]
            if row.state == "waiting":
                prompt = row.prompt
                is_new = prompt.logits is None and not prompt.rows
                if (
                    is_new
                    and budget < (1 if self.can_chunk else prompt.length)
                    and (admission.chunks or self.can_chunk)
                ):
                    break
                if not self.reserve(row):
                    break
                if is_new:
                    budget -= _next_chunk(prompt, budget if self.can_chunk else prompt.length, admission)
                elif prompt.logits is not None and not prompt.rows:
                    admission.joining.append(prompt)
                if not prompt.rows:
                    self._computing.append(prompt)
                self.prompt_hits += not is_new
                prompt.num_waiting -= 1
                prompt.rows.append(row)
                row.state = "admitted"
                slots -= 1
            heapq.heappop(self._line)
        # Rows of similar length can attend in one call.
        admission.chunks.sort(key=lambda chunk: (chunk.start > 0, chunk.length))
        return admission

    def take(self, prompt: Prompt) -> list[Row]:
        """The admitted rows of a complete prompt; they run from here on. `release` it once they have a place."""
        rows, prompt.rows = prompt.rows, []
        for row in rows:
            row.state = "running"
        return rows

    def release(self, prompt: Prompt) -> None:
        """Free what was computed of this prompt, unless requests still wait for it."""
        self._tidy(prompt)
        if not self.keeps_prompts:
            prompt.forget()

    def forget_prompts(self) -> None:
        """Discard what was computed (new weights, freed memory, a failed step)."""
        self._computing = [prompt for prompt in self._computing if prompt.rows]
        self._known = {ids: prompt for ids, prompt in self._known.items() if prompt.rows or prompt.num_waiting}
        for prompt in [*self._known.values(), *self._computing]:
            prompt.forget()

    def drop_all(self) -> list[Row]:
        """Empty the queue; returns the rows that were pending."""
        rows = self.pending
        for row in rows:
            row.state = "ended"
        self._line, self._computing, self._known = [], [], {}
        return rows

    def _tidy(self, prompt: Prompt) -> None:
        if prompt.rows:
            return
        self._computing = [p for p in self._computing if p is not prompt]
        if not prompt.num_waiting:
            prompt.forget()
            if self._known.get(prompt.identity) is prompt:
                del self._known[prompt.identity]


def _next_chunk(prompt: Prompt, budget: int, admission: Admission) -> int:
    """Add the next piece of a prompt; returns its length."""
    length = min(budget, prompt.length - prompt.num_done)
    if length <= 0:
        return 0
    admission.chunks.append(Chunk(prompt, prompt.num_done, prompt.num_done + length))
    return length
