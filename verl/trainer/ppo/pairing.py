"""Pairs of sampled answers, for losses that learn which of two is better.

Each prompt gives its best and its worst answer, adjacent and in this order. A prompt whose answers are all as good
gives two rows without tokens: they count in no mean and cost next to nothing, and mini-batches and the ranks' shares
are those of any other batch. B rows = P prompts x n samples, T response tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from verl.algorithms.groups import lengths_of
from verl.metrics import MetricSet
from verl.protocol import DataProto


def pair_up(batch: DataProto, samples_per_prompt: int, metrics: MetricSet) -> DataProto:
    """(B, ...) -> (2 P, ...): row 2 i is the best answer to prompt i, row 2 i + 1 the worst; the first among equals.

    Best is the answer with the largest advantage. Answers without a token, unscorable ones among them, are none.

    Args:
        batch: the samples of a prompt are adjacent; has ``advantages`` and ``response_mask`` (B, T).
        metrics: gets ``training/pairs``, how many there are; ``training/tied_prompts``, the share of prompts without
            one; ``training/pair_score_gap``, by how much the better answer's score is higher.
    """
    tensors: Any = batch.batch
    mask = tensors["response_mask"]
    lengths = lengths_of(mask)
    # The mean of equal numbers in double precision is that number: lengths break no tie.
    worth = (tensors["advantages"].double() * mask).sum(-1) / lengths.clamp(min=1)
    table, there = (values.numpy().reshape(-1, samples_per_prompt) for values in (worth, lengths > 0))
    best, worst = np.where(there, table, -np.inf), np.where(there, table, np.inf)
    better = there.any(-1) & (best.max(-1) > worst.min(-1))
    preferred = np.where(better, best.argmax(-1), 0)
    rejected = np.where(better, worst.argmin(-1), 1)
    first = np.arange(len(table)) * samples_per_prompt
    pairs = batch.select_idxs(np.stack([first + preferred, first + rejected], axis=-1).ravel())

    valid = torch.from_numpy(better)
    pairs.tensors["response_mask"] = torch.where(valid.repeat_interleave(2)[:, None], pairs.tensors["response_mask"], 0)
    metrics.add("training/pairs", int(better.sum()), "sum")
    metrics.add("training/tied_prompts", 1.0 - float(better.mean()), weight=len(better))
    if better.any():
        scores = pairs.tensors["token_level_scores"].double().sum(-1).view(-1, 2)[valid]
        metrics.add("training/pair_score_gap", (scores[:, 0] - scores[:, 1]).mean().item(), weight=len(scores))
    return pairs
