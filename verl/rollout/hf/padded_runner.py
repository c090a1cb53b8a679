"""The fallback runner: transformers' own cache and attention, for models that the pool does not support.

Prompts admitted together are padded on the left to one length and form a batch with one cache; each running batch takes
one forward pass a step, and rows that end leave their batch. Prompts shared inside a batch are computed once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from verl.models.router_replay import ExpertRecorder
from verl.rollout.hf.rows import Chunk, Prompt, Row
from verl.rollout.hf.runner import UNLIMITED, BorrowedModel
from verl.rollout.hf.seen import Features


@dataclass(eq=False)
class PaddedBatch:
    """Rows that started together.

    Args:
        mask: (rows, tokens so far) 1 on real tokens.
    """

    rows: list[Row]
    cache: DynamicCache
    mask: torch.Tensor


class PaddedRunner:
    """Runs any causal language model with `DynamicCache`; see `Runner` for the methods."""

    can_chunk = False
    keeps_prompts = False
    recorder: ExpertRecorder | None = None
    is_interrupted: Callable[[], bool] | None = None
    features: Features | None = None

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.prefill_tokens = self.decode_tokens = 0
        self._borrowed = BorrowedModel(model, None)
        self._accepts = set(inspect.signature(model.forward).parameters)
        self._batches: list[PaddedBatch] = []
        self._started: tuple[list[Prompt], DynamicCache, torch.Tensor] | None = None

    @property
    def rows(self) -> list[Row]:
        return [row for batch in self._batches for row in batch.rows]

    @property
    def num_cache_bytes(self) -> int:
        tensors = [x for batch in self._batches for layer in batch.cache.layers for x in vars(layer).values()]
        return sum(x.numel() * x.element_size() for x in tensors if isinstance(x, torch.Tensor))

    can_share = True
    num_copied_bytes = 0

    def step(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        with self._borrowed.ready():
            parts = [self._decode(batch) for batch in self._batches]
            if chunks:
                parts.append(self._prefill([chunk.prompt for chunk in chunks]))
        return torch.cat(parts)

    def place(self, admitted: Sequence[tuple[Prompt, Sequence[Row]]]) -> None:
        if self._started is None or not admitted:
            self._started = None
            return
        prompts, cache, mask = self._started
        rows = [row for _, members in admitted for row in members]
        source = [prompts.index(prompt) for prompt, members in admitted for _ in members]
        with torch.inference_mode():
            index = torch.LongTensor(source)
            cache.reorder_cache(index)
            self._batches.append(PaddedBatch(rows, cache, mask[index.to(mask.device)]))
        self._started = None

    def remove(self, rows: Sequence[Row]) -> None:
        gone = set(map(id, rows))
        for batch in self._batches:
            survivors = [i for i, row in enumerate(batch.rows) if id(row) not in gone]
            if survivors and len(survivors) < len(batch.rows):
                with torch.inference_mode():
                    index = torch.LongTensor(survivors)
                    batch.cache.reorder_cache(index)
                    batch.mask = batch.mask[index.to(batch.mask.device)]
            batch.rows = [batch.rows[i] for i in survivors]
        self._batches = [batch for batch in self._batches if batch.rows]

    def clear(self) -> None:
        self._batches, self._started = [], None

    @property
    def capacity(self) -> int:
        return UNLIMITED

    def reserve(self, row: Row) -> bool:
        return True

    def refresh(self) -> None:
        pass

    def release(self) -> None:
        pass

    def _prefill(self, prompts: list[Prompt]) -> torch.Tensor:
        longest = max(p.length for p in prompts)
        pads = [longest - p.length for p in prompts]
        device = self.model.device
        ids = torch.tensor([[0] * pad + list(p.token_ids) for pad, p in zip(pads, prompts)], device=device)
        mask = (torch.arange(longest) >= torch.tensor(pads)[:, None]).long().to(device)
        cache = DynamicCache(config=self.model.config)
        logits, experts = self._forward(ids, mask, (mask.cumsum(-1) - 1).clamp(min=0), cache)
        for number, (prompt, pad) in enumerate(zip(prompts, pads)):
            prompt.num_done = prompt.length
            if experts is not None:
                prompt.experts.append(experts[number, pad:])
        self._started = (prompts, cache, mask)
        self.prefill_tokens += ids.numel()
        return logits

    def _decode(self, batch: PaddedBatch) -> torch.Tensor:
        ids = torch.tensor([[row.tokens[-1]] for row in batch.rows], device=batch.mask.device)
        batch.mask = torch.cat((batch.mask, torch.ones_like(ids)), dim=1)
        self.decode_tokens += ids.numel()
        logits, experts = self._forward(ids, batch.mask, batch.mask.sum(-1, keepdim=True) - 1, batch.cache)
        if experts is not None:
            for row, chosen in zip(batch.rows, experts):
                row.experts.append(chosen)
        return logits

    def _forward(
        self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: Any
    ) -> tuple[torch.Tensor, np.ndarray | None]:
        """(rows, V) logits of the last position, and the recorded experts (rows, tokens, layers, top_k)."""
        arguments = {"position_ids": positions, "logits_to_keep": 1, "attention_mask": mask}
        if "past_key_values" in self._accepts:
            arguments["past_key_values"] = cache
        else:
            # Purely recurrent models: the state knows its past, and a mask of the past would not fit one new token.
            arguments["cache_params"] = cache
            if ids.shape[1] < mask.shape[1]:
                del arguments["attention_mask"]
        accepted = {name: value for name, value in arguments.items() if name in self._accepts}
        with nullcontext() if self.recorder is None else self.recorder.recording():
            logits = self.model(input_ids=ids, use_cache=True, **accepted).logits[:, -1]
            if self.recorder is None:
                return logits, None
            return logits, self.recorder.take().unflatten(0, tuple(ids.shape)).cpu().numpy()
