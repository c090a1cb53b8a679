"""A sampled conversation in the tokens of another model: what a reward model with its own tokenizer reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from verl.data.chat_template import ChatTemplate
from verl.data.messages import Message, as_messages
from verl.data.turns import TurnFinder
from verl.errors import DataError
from verl.protocol import DataProto


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
        max_length: longest conversation in the target's tokens; of a longer one the beginning is cut off.
    """

    def __init__(self, source: Any, target: Any, max_length: int | None = None):
        self.source, self.target, self.max_length = source, target, max_length
        self._turns = TurnFinder(ChatTemplate(target), keep_produced=True, learns=False)

    def rewrite(self, data: DataProto) -> Rewritten:
        """The rows in the target's template and tokens.

        Args:
            data: ``responses`` and ``attention_mask``, and the messages of the prompts in ``raw_prompt``.

        Raises:
            DataError: the batch has no messages.
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
        for number, (prompt, text) in enumerate(zip(prompts, self._texts(data), strict=True)):
            try:
                rows.append(self._ids(prompt, text))
            except DataError as error:  # a policy may write anything, also what no template can hold
                rows.append([0, 0])
                refused[number] = error
        limit = self.max_length
        cut = [limit is not None and len(row) > limit for row in rows]
        return Rewritten(_batch([row[-limit:] if limit else row for row in rows]), cut, refused)

    def _texts(self, data: DataProto) -> list[str]:
        responses = data.tensors["responses"]
        there = data.tensors["attention_mask"][:, -responses.shape[1] :].bool()
        ids = [row[mask].tolist() for row, mask in zip(responses, there)]
        return self.source.batch_decode(ids, skip_special_tokens=True)

    def _ids(self, prompt: Any, text: str) -> list[int]:
        before: list[Message] = as_messages(prompt, lambda: "raw_prompt", padded=False)
        ids, answer = self._turns.encode([*before, {"role": "assistant", "content": text}])
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
