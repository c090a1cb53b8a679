"""What a manager reads from a batch: for each row the text, what to score it against, and where the score goes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch

from verl.errors import DataError
from verl.protocol import DataProto
from verl.protocol.lazy import last_places
from verl.protocol.tokenizer import Tokenizer
from verl.rewards import wire
from verl.rewards.function import RewardFunction
from verl.rewards.invoke import result_of
from verl.rewards.samples import RewardResult, RewardSample
from verl.rewards.truths import is_missing, missing_truth, truth_of

RM_SCORE = "rm_score"
"""Column (B,): what a reward model says of each sample, before a function has its say."""
EARLY = "early_reward"
"""Column (B,): packed results of rows that were scored while others were sampled (`verl.rewards.early`)."""
OWN_SCORE = "reward_score"
"""Column (B,): scores that agent loops know by themselves, None in rows of other loops."""

KNOWN = {
    "__num_turns__": "num_turns",
    "reward_scores": "rollout_reward_scores",
    **{name: name for name in (RM_SCORE, "tool_rewards", "turn_scores")},
}
"""Columns that a function reads in ``extra_info``, and their names there."""


@dataclass(frozen=True)
class SampleRow:
    """One row of a batch.

    ``last`` is the last position of the response that was sampled (None for an empty response), ``length`` the number
    of its tokens, those of tools included.
    """

    sample: RewardSample
    last: int | None
    length: int


def read_rows(
    data: DataProto, tokenizer: Tokenizer, reward_fn_key: str, needed_by: RewardFunction | None
) -> list[SampleRow]:
    """All rows of a batch with decoded responses (special tokens skipped).

    Args:
        data: tensors ``responses (B, T)`` and ``attention_mask (B, P+T)`` or ``response_mask (B, T)``.
        needed_by: the function for which a row without a ground truth is an error; None where it is none. Rows that
            are scored already need none.

    Raises:
        DataError: a row has no ground truth.
    """
    responses = tensor(data, "responses").cpu()
    there, sampled = _masks(data, responses)
    last = _last_positions(sampled)
    lengths = there.sum(-1).tolist()
    tokens = iter(responses[there].tolist())  # those of all rows in one go
    columns, results = data.non_tensor_batch, known_results(data)
    eos = getattr(tokenizer, "eos_token", None)  # tests and users bring tokenizers that only decode
    rows = []
    for i, length in enumerate(lengths):
        text = tokenizer.decode(list(islice(tokens, length)), skip_special_tokens=True)
        sample = RewardSample(
            data_source=_cell(columns, reward_fn_key, i),
            solution_str=text.removesuffix(eos) if isinstance(eos, str) and eos else text,
            ground_truth=_ground_truth(columns, i, needed_by if results[i] is None else None),
            extra_info=_extra_info(columns, i),
            row=i,
        )
        rows.append(SampleRow(sample, last[i], length))
    return rows


def prompt_text(data: DataProto, tokenizer: Tokenizer, row: int) -> str:
    """The prompt of a row as text, empty where the batch holds no prompts."""
    if not has(data, "prompts"):
        return ""
    prompts = tensor(data, "prompts")
    ids = prompts[row]
    if has(data, "attention_mask"):
        ids = ids[tensor(data, "attention_mask")[row, : prompts.size(1)].bool()]
    return tokenizer.decode(ids.tolist(), skip_special_tokens=True)


def has(data: DataProto, name: str) -> bool:
    """Whether the batch holds a tensor of this name."""
    return data.batch is not None and name in data.batch.keys()


def is_scored(data: DataProto) -> bool:
    """Whether the batch was scored while it was sampled; scores of a reward model are only part of a reward."""
    return has(data, "rm_scores") and RM_SCORE not in data.non_tensor_batch


def known_results(data: DataProto) -> list[RewardResult | None]:
    """The result of each row before its function is called: its loop's own score, or a result from earlier."""
    columns, nothing = data.non_tensor_batch, [None] * len(data)
    results: list[RewardResult | None] = list(nothing)
    for row, packed in enumerate(columns.get(EARLY, nothing)):
        if packed is not None:
            results[row] = wire.unpack_results([packed])[0]
    for row, score in enumerate(columns.get(OWN_SCORE, nothing)):
        if score is not None:
            results[row] = result_of(score)
    return results


def tensor(data: DataProto, name: str) -> torch.Tensor:
    """A tensor of the batch; a `DataError` says which one is missing."""
    if data.batch is None or not has(data, name):
        raise DataError("the batch has no such tensor", key=name, allowed="a batch with sampled responses")
    return data.batch[name]


def last_sampled(data: DataProto) -> list[int | None]:
    """For each row the position in the response where a sequence score is written."""
    return _last_positions(_masks(data, tensor(data, "responses"))[1])


def _masks(data: DataProto, responses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two masks ``(B, T)``: the tokens that are there, and those of them that were sampled."""
    if has(data, "attention_mask"):
        there = tensor(data, "attention_mask")[:, -responses.size(1) :].bool().cpu()
    elif has(data, "response_mask"):
        there = tensor(data, "response_mask").bool().cpu()
    else:
        there = torch.ones_like(responses, dtype=torch.bool)
    return there, tensor(data, "response_mask").bool().cpu() if has(data, "response_mask") else there


def _last_positions(mask: torch.Tensor) -> list[int | None]:
    return [None if place < 0 else place for place in last_places(mask).tolist()]


def _cell(columns: Mapping[str, np.ndarray], name: str, row: int) -> Any:
    return columns[name][row] if name in columns else None


def _ground_truth(columns: Mapping[str, np.ndarray], row: int, needed_by: RewardFunction | None) -> Any:
    holder = _cell(columns, "reward_model", row)
    truth = truth_of(holder)
    if needed_by is not None and is_missing(truth):
        raise missing_truth(f"row {row} of the batch", holder, needed_by.label, needed_by.is_builtin)
    return truth


def _extra_info(columns: Mapping[str, np.ndarray], row: int) -> dict[str, Any]:
    """The row's ``extra_info`` (a copy) with what the run knows: turns, rewards of tools, the reward model's score."""
    info = _cell(columns, "extra_info", row)
    extra_info = dict(info) if isinstance(info, Mapping) else {}
    for column, name in KNOWN.items():
        if column in columns and columns[column][row] is not None:  # another loop's rows may have it alone
            extra_info[name] = columns[column][row]
    return extra_info
