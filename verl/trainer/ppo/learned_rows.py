"""Which rows of a batch an update learns from, and with what weight, where a method selects them by their scores.

PF-PPO (arXiv 2409.06957) draws rows with replacement. Losses on pairs learn which of two answers is better: each prompt
gives its best and its worst one, adjacent and in this order. The language-model loss on right answers (VAPO, arXiv
2504.05118) is the mean over the tokens of the correct answers of a mini-batch, all of which only the controller sees.
So no selection depends on micro-batches and ranks. B rows = P prompts x n samples, T response tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.algorithms.groups import lengths_of
from verl.algorithms.reweighting import resampled_rows
from verl.metrics import MetricSet
from verl.protocol import DataProto
from verl.trainer.ppo import accounting, group_filter
from verl.trainer.ppo.context import StepContext
from verl.trainer.ppo.sample_rows import last_rows


def rows_to_train(batch: DataProto, ctx: StepContext) -> DataProto:
    """The batch, or the rows that a method selects by score: PF-PPO's draw, or the pair of each prompt."""
    rows = batch
    if ctx.config.algorithm.use_pf_ppo:
        rows = resample(batch, ctx)
    elif ctx.run.learns_from_pairs:
        rows = pair_up(batch, ctx.run.samples_per_prompt, ctx.metrics)
    accounting.chosen(batch, rows, ctx)
    return rows


def resample(batch: DataProto, ctx: StepContext) -> DataProto:
    """Policy filtration (PF-PPO, arXiv 2409.06957): rows drawn with replacement, by the run's seed and the step."""
    rule, scores = ctx.config.algorithm.pf_ppo, batch.tensors["token_level_scores"].sum(-1)
    rows = resampled_rows(scores, rule.reweight_method, rule.weight_pow, seed=ctx.config.trainer.seed + ctx.step)
    ctx.metrics.add("training/pf_ppo/distinct_rows", len(rows.unique()) / len(rows), weight=len(rows))
    return batch.select_idxs(rows)


def pair_up(batch: DataProto, samples_per_prompt: int, metrics: MetricSet) -> DataProto:
    """(B, ...) -> (2 P, ...): row 2 i is the best answer to prompt i, row 2 i + 1 the worst; the first among equals.

    Best is the answer with the largest advantage. Answers without a token, unscorable ones among them, are none. A
    prompt whose answers are all as good gives two rows without tokens: they count in no mean and cost next to nothing,
    and mini-batches and the ranks' shares are those of any other batch.

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


def right_answers(samples: DataProto) -> Tensor:
    """(B,) float32: 1 where the answer is right, which is ``acc`` above 0 if the scorer returns it, else the score."""
    right = np.nan_to_num(group_filter.accuracies(samples), nan=0.0) > 0
    return torch.from_numpy(right & ~group_filter.out_of_statistics(samples)).float()


def mark_right_answers(batch: DataProto, ctx: StepContext) -> None:
    """Adds positive (B,), where the loss on right answers is on (``actor.positive_lm_coef``)."""
    if ctx.config.actor_rollout_ref.actor.positive_lm_coef:
        batch.tensors["positive"] = right_answers(batch)
        marks = last_rows(batch.select(batch_keys=["positive"])).tensors["positive"]
        ctx.metrics.add("training/positive_samples", marks.mean().item(), weight=len(marks))


def weigh_right_answers(mini_batch: DataProto) -> None:
    """Adds positive_lm_weights (B, T), where answers are marked: 1 / N on the N tokens of right ones, 0 elsewhere."""
    tensors = mini_batch.tensors
    if "positive" not in tensors.keys():
        return
    valid = tensors["response_mask"].float() * tensors["positive"][:, None]
    tensors["positive_lm_weights"] = valid / valid.sum().clamp(min=1.0)
