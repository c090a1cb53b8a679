"""What the scheduler and the runners pass to each other: rows, the prompts they share, and pieces of prefill."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch

from verl.rollout.base import Completion, FinishReason, Request, SamplingParams
from verl.rollout.hf.seen import PromptView
from verl.rollout.resume import after, join_attempts

RowState = Literal["waiting", "admitted", "running", "ended"]
UNIFORMS_AT_ONCE = 32
"""Random numbers are made for that many positions of a row at a time."""


@dataclass(eq=False)
class Row:
    """One running request: its tokens so far, and where its keys and values are.

    ``state`` belongs to the scheduler; ``cell`` is the runner's own note of the place; ``most`` tokens may be drawn.
    ``earlier`` is what the response got before new weights interrupted it, which the request has as its prefix.
    ``experts``, where they are recorded, are pieces (tokens, layers, top_k) of those of its prompt and of its tokens.
    """

    request: Request
    prompt: Prompt
    stops: frozenset[int]
    key: np.ndarray
    future: asyncio.Future[Completion] | None = None
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    state: RowState = "waiting"
    cell: object = None
    uniforms: list[float] = field(default_factory=list)
    earlier: tuple[Completion, ...] = ()
    experts: list[np.ndarray] = field(default_factory=list)
    most: int = field(init=False)

    def __post_init__(self) -> None:
        self.most = self.request.sampling.max_tokens - len(self.request.generated_prefix)

    @classmethod
    def bare(cls, prompt: Prompt) -> Row:
        """A row without a caller, to try things out with."""
        request = Request("bare", prompt.token_ids, SamplingParams())
        return cls(request, prompt, frozenset(), np.zeros(2, dtype=np.uint64))

    @property
    def budget(self) -> int:
        """Tokens that may still be drawn."""
        return self.most - len(self.tokens)

    @property
    def may_end(self) -> bool:
        """Whether the token that is drawn next may end the response."""
        return len(self.request.generated_prefix) + len(self.tokens) >= self.request.sampling.min_tokens

    @property
    def is_complete(self) -> bool:
        """Whether its last token was drawn."""
        return self.tokens[-1] in self.stops or len(self.tokens) >= self.most

    @property
    def num_cached(self) -> int:
        """Tokens whose keys and values exist: all but the last drawn one."""
        return self.prompt.length + max(0, len(self.tokens) - 1)

    def position(self) -> int:
        """Position in the whole sequence of the token that is drawn next."""
        return self.prompt.length + len(self.tokens)

    def attempt(self, reason: FinishReason, version: int) -> Completion:
        """The tokens since the response began, or was last interrupted."""
        versions = (version,) * len(self.tokens)
        experts = np.concatenate(self.experts) if self.experts else None
        return Completion(self.request.id, tuple(self.tokens), tuple(self.log_probs), reason, versions, experts)

    @property
    def length(self) -> int:
        """Tokens of the response so far, with those that it had when it came here."""
        return len(self.request.generated_prefix) + len(self.tokens)

    @property
    def began(self) -> int:
        """Tokens that the response had when it came here."""
        return len(self.request.generated_prefix) - sum(len(part.token_ids) for part in self.earlier)

    def since(self, count: int, version: int) -> Completion:
        """What was drawn here behind the first ``count`` tokens of the response, without recorded experts."""
        parts, skip = [], count - self.began
        for part in self.earlier:
            if skip < len(part.token_ids):
                parts.append(after(part, skip))
            skip = max(0, skip - len(part.token_ids))
        tokens = tuple(self.tokens[skip:])
        log_probs, versions = tuple(self.log_probs[skip:]), (version,) * len(tokens)
        return join_attempts((*parts, Completion(self.request.id, tokens, log_probs, "abort", versions)))

    def finish(self, reason: FinishReason, version: int, is_interrupted: bool = False) -> None:
        """Resolve the caller's future."""
        if self.future is not None and not self.future.done():
            done = join_attempts((*self.earlier, self.attempt(reason, version)))
            self.future.set_result(replace(done, is_interrupted=is_interrupted))

    def fail(self, error: Exception) -> None:
        if self.future is not None and not self.future.done():
            self.future.set_exception(error)


@dataclass(eq=False)
class Prompt:
    """Token ids that are computed once for all rows that begin with them.

    Args:
        token_ids: prompt and, for a continued request, the response tokens it already has.
        num_waiting: rows that still wait for a slot; while there are any, ``pieces`` and ``logits`` are kept.
        rows: admitted rows that wait for the prefill to end.
        num_done: tokens computed.
        pieces: keys (layers, heads, tokens, dim) and values of ``token_ids[:num_done]``, in order.
        logits: (V,) of the last position, once everything is computed.
        experts: of ``token_ids[:num_done]``, in order, where they are recorded.
        view: its pictures, if it has any.
    """

    token_ids: tuple[int, ...]
    num_waiting: int = 0
    rows: list[Row] = field(default_factory=list)
    num_done: int = 0
    pieces: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    logits: torch.Tensor | None = None
    experts: list[np.ndarray] = field(default_factory=list)
    view: PromptView | None = None

    @property
    def length(self) -> int:
        return len(self.token_ids)

    @property
    def identity(self) -> tuple[tuple[int, ...], bytes]:
        """Equal for prompts whose computation serves each other."""
        return self.token_ids, b"" if self.view is None else self.view.digest

    @property
    def shift(self) -> int:
        """Added to the number of a token behind the prompt for its rotary position."""
        return 0 if self.view is None else self.view.shift

    def forget(self) -> None:
        """Drop what was computed; the next row starts from nothing."""
        self.num_done, self.pieces, self.logits, self.experts = 0, [], None, []


@dataclass(frozen=True)
class Chunk:
    """``prompt.token_ids[start:end]`` is computed in this step."""

    prompt: Prompt
    start: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.start

    @property
    def completes(self) -> bool:
        return self.end == self.prompt.length
