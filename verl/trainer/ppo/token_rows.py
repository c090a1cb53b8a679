"""What `verl.observability.token_dump` writes of a step: copies of the batch's tokens, and how each row fared.

Only copies are made here; the table, its texts of tokens and the file are the thread's.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from verl.config import PPOTrainerConfig
from verl.data.sample_texts import SampleTexts, ends_of
from verl.json_text import JsonObject
from verl.observability.token_dump import Pieces, table_of
from verl.protocol import DataProto
from verl.protocol.lazy import fetched, row_bounds
from verl.trainer.ppo import accounting
from verl.trainer.ppo.context import StepContext
from verl.trainer.ppo.correction import KEPT_MASK

COLUMNS = {
    "token_id": "responses", "mask": "response_mask", "version": "token_versions",
    "sampler_log_prob": "rollout_log_probs", "trainer_log_prob": "old_log_probs", "advantage": "advantages",
    "entropy": "entropys",
}  # fmt: skip
"""Column of a file -> of a batch, (B, T); those that a batch lacks are left out."""
Values = dict[str, list[Any]]
"""Column -> a value per row."""
TEXTS = {"inputs": "input", "outputs": "output", "gts": "gts", "scores": "score"}


def is_drawn(uids: np.ndarray, share: float) -> np.ndarray:
    """(B,) bool: rows whose prompts are drawn, all answers to one or none; the same in a resumed run."""
    return np.array([zlib.crc32(str(uid).encode()) < share * 2**32 for uid in uids], dtype=bool)


class TokenRows:
    """Copies what the file of a step needs.

    Args:
        texts: of the run.
    """

    def __init__(self, config: PPOTrainerConfig, texts: SampleTexts):
        self._share, self._texts = config.trainer.rollout_data_tokens, texts
        actor = config.actor_rollout_ref.actor
        low, high = actor.clip_ratio_low, actor.clip_ratio_high
        self._low = 1 - (actor.clip_ratio if low is None else low)
        self._high = 1 + (actor.clip_ratio if high is None else high)
        self._has_own_log_probs = not config.algorithm.rollout_correction.bypass_mode
        self._pieces = Pieces(texts.tokenizer.decode)

    def of(self, batch: DataProto, described: JsonObject, ctx: StepContext, updated: bool) -> Callable[[], pa.Table]:
        """A function that makes the table; what it needs is copied now.

        Args:
            described: the rows as text, as the JSON lines have them.
            updated: whether a model was updated in this step.
        """
        tensors = batch.tensors
        there = fetched(tensors["attention_mask"])[:, -tensors["responses"].shape[1] :].bool()
        uids = batch.non_tensor_batch.get("uid", np.arange(len(batch)).astype(str))
        drawn = is_drawn(uids, self._share)
        is_written = there & torch.from_numpy(drawn)[:, None]
        lengths = there.sum(-1).numpy()
        tokens: dict[str, Any] = {}
        for name, column in COLUMNS.items():
            is_own = name != "trainer_log_prob" or self._has_own_log_probs
            if column in tensors.keys() and is_own:
                tokens[name] = fetched(tensors[column])[is_written].numpy()
        # On this thread: another one must not use the tokenizer while this one sets its padding.
        tokens["token_text"] = self._pieces.of(tokens["token_id"], np.cumsum(np.where(drawn, lengths, 0)))
        facts = self._facts(batch, there, ctx, updated)
        short = {"step": [ctx.step] * len(batch), "length": lengths.tolist(), **facts}
        columns = {TEXTS[name]: described[name] for name in TEXTS}
        columns |= {"picture": self._texts.pictures(batch, len(batch))} if self._texts.processor is not None else {}
        named = {*ends_of(batch), *accounting.names_of(batch)}
        extra = {name: list(column) for name, column in described["reward_extra_infos"].items() if name not in named}
        return partial(table_of, {**columns, **short}, extra, tokens, lengths, drawn)

    def _facts(self, batch: DataProto, there: Tensor, ctx: StepContext, updated: bool) -> Values:
        """Columns of `SHORT` besides step and length."""
        tensors, names = batch.tensors, batch.non_tensor_batch
        width = tensors["prompts"].shape[1]
        made: Values = accounting.names_of(batch)
        made["prompt_length"] = fetched(tensors["attention_mask"])[:, :width].sum(-1).tolist()
        made["reason"] = list(accounting.reasons_of(batch, ctx, updated))
        if "finish_reason" in names:
            made["finish_reason"] = list(names["finish_reason"])
        if "token_versions" in tensors.keys():
            oldest, newest = row_bounds(tensors["token_versions"])
            has_any = newest >= 0
            made["oldest_version"], made["newest_version"] = (
                [value if ok else None for value, ok in zip(bound.tolist(), has_any.tolist())]
                for bound in (oldest, newest)
            )
        if self._has_own_log_probs and {"old_log_probs", "rollout_log_probs"} <= set(tensors.keys()):
            ratio = (fetched(tensors["old_log_probs"]) - fetched(tensors["rollout_log_probs"])).exp()
            mask = fetched(tensors.get(KEPT_MASK, tensors["response_mask"])).bool() & there
            outside = ((ratio < self._low) | (ratio > self._high)) & mask
            made["clipped"] = (outside.sum(-1) / mask.sum(-1).clamp(min=1)).tolist()
        return made
