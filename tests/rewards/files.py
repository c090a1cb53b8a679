"""Writes small reward files and makes samples and batches for the tests of this room."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.harness.rows import columns
from verl.protocol import DataProto
from verl.rewards import RewardSample

PAD = 0


def reward_file(folder: Path, code: str, name: str = "my_reward.py") -> str:
    """A Python file with this code."""
    path = folder / name
    path.write_text(textwrap.dedent(code), encoding="utf-8")
    return str(path)


def samples(*texts: str, truth: Any = "42") -> list[RewardSample]:
    """One sample per text."""
    return [RewardSample("d", text, truth, {"index": 10 + i}, i) for i, text in enumerate(texts)]


class Letters:
    """A tokenizer of single characters; 0 is padding, 1 ends a text and is special."""

    eos_token = "</s>"

    def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(i) for i in ids if i > 1)


def batch(
    responses: Sequence[str],
    truths: Sequence[Any] | None = None,
    source: str | None = "openai/gsm8k",
    masks: Sequence[Sequence[int]] | None = None,
    **more: Any,
) -> DataProto:
    """Left-padded prompts ``ask N``, right-padded responses that end with the end token, and the columns of rewards."""
    encoded = [[*(ord(c) for c in text), 1] if text else [] for text in responses]
    width = max(1, *(len(ids) for ids in encoded))
    response_ids = torch.tensor([ids + [PAD] * (width - len(ids)) for ids in encoded])
    there = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids in encoded])
    prompts = torch.tensor([[PAD, *(ord(c) for c in f"ask {i % 10}")] for i in range(len(responses))])
    prompt_mask = (prompts != PAD).long()
    if source is not None:
        more["data_source"] = [source] * len(responses)
    if truths is not None:
        more["reward_model"] = [{"style": "rule", "ground_truth": truth} for truth in truths]
    return DataProto.from_dict(
        tensors={
            "prompts": prompts,
            "responses": response_ids,
            "attention_mask": torch.cat([prompt_mask, there], 1),
            "response_mask": there if masks is None else torch.tensor(masks),
        },
        non_tensors=columns(**more),
    )
