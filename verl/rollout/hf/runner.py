"""The sampler's interface to its runners: prompts in, next-token logits out, rows that join and leave."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, cast

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from verl.errors import RolloutError
from verl.models.router_replay import ExpertRecorder
from verl.rollout.hf.rows import Chunk, Prompt, Row
from verl.rollout.hf.seen import Features

UNLIMITED = 1 << 62
"""Capacity of a cache that grows as it needs."""


class ModelRunner(Protocol):
    """Computes steps over the rows it was given.

    Attributes:
        can_chunk: whether a prompt may be computed in several steps.
        keeps_prompts: whether a computed prompt can serve rows that are admitted later.
        prefill_tokens, decode_tokens: what went through the model so far; padding counts where exactness asks for it.
        features: of pictures in prompts; None where prompts are text.
        recorder: leaves the experts of each token in ``experts`` of its row or prompt; None: nothing is recorded.
        is_interrupted: called within a pass that computes no prompt: whether it ends by `PassInterrupted`; not by a
            runner that cannot interrupt a pass.
    """

    recorder: ExpertRecorder | None
    is_interrupted: Callable[[], bool] | None
    features: Features | None
    can_chunk: bool
    keeps_prompts: bool
    prefill_tokens: int
    decode_tokens: int

    @property
    def rows(self) -> Sequence[Row]:
        """The running rows, in the order in which `step` returns their logits."""
        ...

    @property
    def capacity(self) -> int:
        """Tokens of the longest row that an empty cache can hold."""
        ...

    def reserve(self, row: Row) -> bool:
        """Reserve what a waiting row will need, if available; `place` uses it, `remove` frees it."""
        ...

    def step(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """One forward pass: the next token of every row, and ``chunks`` of prompts.

        Returns:
            (R + C, V) logits: of each running row, then of the last token of each prompt that is now complete, in the
            order of ``chunks``.
        """
        ...

    def place(self, admitted: Sequence[tuple[Prompt, Sequence[Row]]]) -> None:
        """Start decoding these rows; their prompts are complete and each has its first token."""
        ...

    def remove(self, rows: Sequence[Row]) -> None:
        """These rows have ended: running ones, and such that were only reserved."""
        ...

    def clear(self) -> None:
        """Drop all rows and all memory that depends on them."""
        ...

    def refresh(self) -> None:
        """The model has new weights."""
        ...

    def release(self) -> None:
        """Drop everything derived from the model's weights; what is needed is made again."""
        ...

    @property
    def can_share(self) -> bool:
        """Whether the memory of the model's parameters may be replaced."""
        ...

    @property
    def num_cache_bytes(self) -> int: ...

    @property
    def num_copied_bytes(self) -> int:
        """Memory of what is derived from the model's weights."""
        ...


def vocab_size(model: PreTrainedModel) -> int:
    """Rows of the input embedding: what a token id must be below (padding of the vocabulary included)."""
    words = cast(nn.Embedding, model.get_input_embeddings())
    # On several ranks the weight is a shard, but the module still has the full size.
    return getattr(words, "num_embeddings", words.weight.shape[0])


def context_length(model: PreTrainedModel, max_model_len: int | None) -> int:
    """The model's context, or ``max_model_len`` if that is shorter; a longer one is an error."""
    limit = vars(model.config.get_text_config(decoder=True)).get("max_position_embeddings")
    if max_model_len is None:
        return limit or 1 << 30
    if max_model_len < 1 or (limit and max_model_len > limit):
        raise RolloutError(
            "longer than the model's context" if max_model_len > 0 else "not a length",
            key="max_model_len",
            got=max_model_len,
            allowed=f"1 to {limit}",
        )
    return max_model_len


def default_stops(model: PreTrainedModel) -> Sequence[int]:
    """End-of-sequence ids of the generation config, else of the model's configuration."""
    generation: GenerationConfig | None = model.generation_config
    stops = None if generation is None else generation.eos_token_id
    if stops is None:
        stops = model.config.get_text_config(decoder=True).eos_token_id
    if stops is None:
        return ()
    return [int(x) for x in stops] if isinstance(stops, Sequence) else [int(stops)]


class BorrowedModel:
    """A model whose attention implementation and mode belong to its owner between the steps.

    Args:
        implementation: attention implementation during a step; None leaves the model's own.
    """

    def __init__(self, model: nn.Module, implementation: str | None):
        self.model, self.implementation = model, implementation
        configs: dict[int, PreTrainedConfig] = {}
        for module in model.modules():
            config = vars(module).get("config")
            if isinstance(config, PreTrainedConfig):
                configs[id(config)] = config
        model_config: Any = vars(model).get("config")
        text = model_config and model_config.get_text_config(decoder=True)
        if text is not model_config and id(text) in configs:
            configs = {id(text): text}  # a vision encoder attends in both directions
        self._configs = list(configs.values())

    @contextmanager
    def ready(self) -> Iterator[None]:
        """No gradients, evaluation mode, this attention implementation; all restored afterwards."""
        was_training = self.model.training
        before = [config._attn_implementation for config in self._configs]
        try:
            if was_training:
                self.model.eval()
            if self.implementation is not None:
                self._set([self.implementation] * len(before))
            with torch.inference_mode():
                yield
        finally:
            if self.implementation is not None:
                self._set(before)
            if was_training:
                self.model.train()

    def _set(self, implementations: Sequence[Any]) -> None:
        for config, implementation in zip(self._configs, implementations):
            config._attn_implementation = implementation
