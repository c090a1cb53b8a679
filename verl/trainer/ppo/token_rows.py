"""What `verl.observability.token_dump` writes of a step: copies of the batch's tokens, and how each row fared.

Only copies are made here; the table, its texts of tokens and the file are the thread's.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from verl.config import PPOTrainerConfig
from verl.data.sample_texts import FINISH, NUM_TOKENS, SampleTexts
from verl.json_text import JsonObject
from verl.observability.token_dump import Pieces, table_of
from verl.protocol import DataProto
from verl.protocol.lazy import fetched_tensors, row_bounds
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
        self._recomputes_log_probs = not config.algorithm.rollout_correction.bypass_mode
        self._pieces = Pieces(texts.tokenizer.decode)

    def of(self, batch: DataProto, described: JsonObject, ctx: StepContext, updated: bool) -> Callable[[], pa.Table]:
        """A function that makes the table; what it needs is copied now.

        Args:
            described: the rows as text, as the JSON lines have them.
            updated: whether a model was updated in this step.
        """
        tensors = self._tensors(batch)
        there = tensors["attention_mask"][:, -tensors["responses"].shape[1] :].bool()
        uids = batch.non_tensor_batch.get("uid", np.arange(len(batch)).astype(str))
        drawn = is_drawn(uids, self._share)
        is_written = there & torch.from_numpy(drawn)[:, None]
        lengths = there.sum(-1).numpy()
        tokens: dict[str, Any] = {
            name: tensors[column][is_written].numpy() for name, column in COLUMNS.items() if column in tensors
        }
        if "version" in tokens:
            tokens["version"] = pa.array(tokens["version"], mask=tokens["version"] < 0)
        if "sampler_log_prob" in tokens:
            is_inserted = ~is_sampled(tensors)[is_written].numpy()
            tokens["sampler_log_prob"] = pa.array(tokens["sampler_log_prob"], mask=is_inserted)
        # On this thread: another one must not use the tokenizer while this one sets its padding.
        tokens["token_text"] = self._pieces.of(tokens["token_id"], np.cumsum(np.where(drawn, lengths, 0)))
        facts, details = self._facts(batch, tensors, there), described["reward_extra_infos"]
        short = {"step": [ctx.step] * len(batch), "length": lengths.tolist(), **facts}
        short["reason"] = list(accounting.reasons_of(batch, ctx, updated))
        if FINISH in details:
            short["finish_reason"] = details[FINISH]
        columns = {TEXTS[name]: described[name] for name in TEXTS}
        named = {NUM_TOKENS, FINISH, *accounting.names_of(batch)}
        extra = {name: list(column) for name, column in details.items() if name not in named}
        pictures = self._texts.picture_maker(batch, drawn)

        def make() -> pa.Table:
            return table_of({**columns, **short, "picture": pictures()}, extra, tokens, lengths, drawn)

        return make

    def _tensors(self, batch: DataProto) -> dict[str, Tensor]:
        """What is read of a batch, fetched in one go; without the trainer's log-probs where they are the sampler's."""
        left_out = () if self._recomputes_log_probs else ("old_log_probs",)
        names = [name for name in (*COLUMNS.values(), "attention_mask", KEPT_MASK) if name not in left_out]
        present = set(batch.tensors.keys())
        return fetched_tensors({name: batch.tensors[name] for name in names if name in present})

    def _facts(self, batch: DataProto, tensors: dict[str, Tensor], there: Tensor) -> Values:
        """Columns of `SHORT` besides step, length, reason and how the response ended."""
        made: Values = accounting.names_of(batch)
        made["prompt_length"] = tensors["attention_mask"][:, : batch.tensors["prompts"].shape[1]].sum(-1).tolist()
        if "token_versions" in tensors:
            oldest, newest = row_bounds(tensors["token_versions"])
            has_any = newest >= 0
            made["oldest_version"], made["newest_version"] = (
                [value if ok else None for value, ok in zip(bound.tolist(), has_any.tolist())]
                for bound in (oldest, newest)
            )
        if {"old_log_probs", "rollout_log_probs"} <= tensors.keys():
            ratio = (tensors["old_log_probs"] - tensors["rollout_log_probs"]).exp()
            mask = tensors.get(KEPT_MASK, tensors["response_mask"]).bool() & there
            outside = (((ratio < self._low) | (ratio > self._high)) & mask).sum(-1).tolist()
            made["clipped"] = [count / of if of else None for count, of in zip(outside, mask.sum(-1).tolist())]
        return made


def is_sampled(tensors: Mapping[str, Tensor]) -> Tensor:
    """(B, T) bool: tokens that the policy drew; the others were inserted by tools and users, or are padding.

    They have a version. In a row without any version they are those of the mask, or all where it masks everything.
    """
    mask = tensors["response_mask"].bool()
    by_mask = mask | ~mask.any(-1, keepdim=True)
    if "token_versions" not in tensors:
        return by_mask
    has_version = tensors["token_versions"] >= 0
    return torch.where(has_version.any(-1, keepdim=True), has_version, by_mask)
