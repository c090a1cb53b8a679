"""A sampled conversation in the tokens of another model: what a reward model with its own tokenizer reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from verl.data.chat_template import ChatTemplate
from verl.data.messages import MEDIA, Message, as_messages
from verl.data.turns import TurnFinder
from verl.data.vision.parts import bare, media_parts
from verl.data.vision.processor import Inputs, Pieces, VisionProcessor
from verl.errors import DataError, ModelError
from verl.protocol import DataProto

SEEN, INPUTS = "multi_modal_data", "multi_modal_inputs"
"""Columns of a batch: images and videos, and what a processor made of them."""


def same_encoding(tokenizer: Any, other: Any) -> bool:
    """Whether two tokenizers write every conversation with the same ids: vocabulary and chat template are equal."""
    return tokenizer.get_vocab() == other.get_vocab() and tokenizer.chat_template == other.chat_template


@dataclass(frozen=True)
class Rewritten:
    """Conversations in other tokens.

    Args:
        batch: ``input_ids``, ``attention_mask``, ``position_ids`` (B, L), ``responses`` and ``response_mask``
            (B, L - 1), in which the last token of each answer, its end token included, has mask 1.
        cut: whose beginning is missing.
        refused: what the template says against a conversation, by row; such a row is two padding tokens.
    """

    batch: DataProto
    cut: list[bool]
    refused: dict[int, DataError]


class Rewriter:
    """Decodes responses with one tokenizer and writes prompt and response with the chat template of another.

    Args:
        source: the tokenizer that the samples are written in.
        target: that of the model which reads them.
        max_length: longest conversation in the target's tokens; of a longer one the beginning is cut off, and one that
            shows something is refused.
        processor: of the model which reads them; None for one that reads only text.
    """

    def __init__(
        self, source: Any, target: Any, max_length: int | None = None, processor: VisionProcessor | None = None
    ):
        self.source, self.target, self.max_length, self.processor = source, target, max_length, processor
        self._turns = TurnFinder(ChatTemplate(target), keep_produced=True, learns=False)

    def rewrite(self, data: DataProto) -> Rewritten:
        """The rows in the target's template and tokens.

        Args:
            data: ``responses`` and ``attention_mask``, the messages of the prompts in ``raw_prompt``, and their images
                in ``multi_modal_data``.

        Raises:
            DataError: the batch has no messages. ModelError: it has images, and the target reads only text.
        """
        if "raw_prompt" not in data.non_tensor_batch:
            raise DataError(
                "the prompts' messages are needed to write them with the reward model's chat template",
                key="raw_prompt",
                fix="Set data.return_raw_chat=true.",
            )
        rows: list[list[int]] = []
        refused: dict[int, DataError] = {}
        prompts = data.non_tensor_batch["raw_prompt"]
        media = data.non_tensor_batch.get(SEEN, [None] * len(prompts))
        column = np.empty(len(prompts), dtype=object)
        for number, (prompt, text) in enumerate(zip(prompts, self._texts(data), strict=True)):
            column[number] = {}
            try:
                inputs, pieces = self._look(number, prompt, media[number] or {})
                ids = self._ids(prompt, text, pieces)
                if inputs and self.max_length is not None and len(ids) > self.max_length:
                    raise DataError(f"with its images it has {len(ids)} tokens, more than {self.max_length}")
                rows.append(ids)
                column[number] = inputs
            except DataError as error:  # a policy may write anything, also what no template can hold
                rows.append([0, 0])
                refused[number] = error
        limit = self.max_length
        cut = [limit is not None and len(row) > limit for row in rows]
        batch = _batch([row[-limit:] if limit else row for row in rows])
        if any(column):
            batch.non_tensor_batch[INPUTS] = column
        return Rewritten(batch, cut, refused)

    def _look(self, number: int, prompt: Any, media: Mapping[str, Any]) -> tuple[Inputs, Pieces]:
        """What the target's processor makes of a row's images and videos, in the order of its messages."""
        waiting = {kind: list(media.get(f"{kind}s") or ()) for kind in MEDIA}
        if not any(waiting.values()):
            return {}, {}
        if self.processor is None:
            raise ModelError(
                "the prompts have images, and the reward model reads only text",
                key="reward.reward_model.model_path",
                fix="Set it to a model that sees, or reward.reward_model.enable=false.",
            )
        messages = as_messages(prompt, lambda: "raw_prompt", media=MEDIA, padded=False)
        parts = [part["type"] for part in media_parts(messages)]
        if any(parts.count(kind) != len(them) for kind, them in waiting.items()):
            raise DataError("images of later turns cannot be written in the tokens of another model")
        return self.processor.process([waiting[kind].pop(0) for kind in parts], f"row {number} of a batch")

    def _texts(self, data: DataProto) -> list[str]:
        responses = data.tensors["responses"]
        there = data.tensors["attention_mask"][:, -responses.shape[1] :].bool()
        ids = [row[mask].tolist() for row, mask in zip(responses, there)]
        return self.source.batch_decode(ids, skip_special_tokens=True)

    def _ids(self, prompt: Any, text: str, pieces: Pieces) -> list[int]:
        before: list[Message] = as_messages(prompt, lambda: "raw_prompt", media=MEDIA, padded=False)
        ids, answer = self._turns.encode([*bare(before), {"role": "assistant", "content": text}])
        if self.processor is not None:
            ids, answer = self.processor.expand_with(ids, pieces, answer)
        while answer and not answer[-1]:  # what the template writes behind the turn is none of the answer
            ids.pop()
            answer.pop()
        return ids


def _batch(rows: Sequence[Sequence[int]]) -> DataProto:
    width = max(2, *(len(row) for row in rows)) if rows else 2
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    attention = torch.zeros_like(ids)
    last = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = torch.tensor(row, dtype=torch.int64)
        attention[number, : len(row)] = 1
        last[number, len(row) - 1] = 1
    return DataProto.from_dict(
        tensors={
            "input_ids": ids,
            "attention_mask": attention,
            "position_ids": (attention.cumsum(-1) - 1).clamp(min=0),
            "responses": ids[:, 1:],
            "response_mask": last[:, 1:],
        }
    )
