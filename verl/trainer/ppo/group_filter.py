"""Which groups of samples are trained on: those with a learning signal, and of these the instructive ones.

A group is all samples of one prompt. Where they all come out the same, a group estimator gives every one of them an
advantage of zero: dynamic sampling (DAPO, arXiv 2503.14476) drops it. A prompt that is nearly always or nearly never
answered rightly teaches little: the online filter of PRIME (arXiv 2502.01456) prefers others, where more prompts are
sampled than are trained on (``data.oversample_factor``). Where too few are liked, others fill the batch, so that a step
samples once. Under every schedule the choice is among the candidates of a chunk, groups that dynamic sampling has left.
Shapes: B rows, G groups.
"""

from __future__ import annotations

import numpy as np

from verl.algorithms.groups import group_means
from verl.algorithms.validation import is_numeric
from verl.errors import DataError, suggest
from verl.protocol import DataProto
from verl.trainer.ppo.context import StepContext
from verl.trainer.ppo.sample_rows import shared

SCORE_SUMS = (None, "reward", "seq_reward", "seq_final_reward")
"""Values of ``filter_groups.metric`` that name the reward of the sequence."""
KEY = "algorithm.filter_groups.metric"
ACCURACY = "acc"
"""What a scorer may return next to the score: how correct a sample is, 0 to 1."""
DETAILS = "score_details"
"""Key of ``meta_info``: the columns that a scorer returned besides the scores, for any sample of a batch."""
ROUNDING = 1e-6
CUT_OFF = "length"


def group_numbers(samples: DataProto) -> np.ndarray:
    """(B,) int: the number of each row's group, 0 .. G - 1."""
    return np.unique(samples.non_tensor_batch["uid"].astype(str), return_inverse=True)[1]


def out_of_statistics(samples: DataProto) -> np.ndarray:
    """(B,) bool: rows that could not be scored, or were cut off before they ended."""
    unscorable = samples.non_tensor_batch.get("unscorable")
    return np.zeros(len(samples), dtype=bool) if unscorable is None else unscorable.astype(bool)


def outcomes(samples: DataProto, metric: str | None) -> np.ndarray:
    """(B,) float64: what has to differ inside a group; NaN where a sample has no such value.

    Args:
        metric: None, ``reward``, ``seq_reward`` or ``seq_final_reward`` for the sum of the token scores; else a key
            that the scorer returned (``acc``, ``score``, ...).

    Raises:
        DataError: the scorer returned no such key, or something else than numbers under it.
    """
    if metric in SCORE_SUMS or (metric == "score" and "score" not in samples.non_tensor_batch):
        return shared(samples, samples.tensors["token_level_scores"].double().sum(-1)).numpy()
    column = samples.non_tensor_batch.get(str(metric))
    details = samples.meta_info.get(DETAILS, ())
    numeric_keys = sorted(name for name in details if is_numeric(samples.non_tensor_batch[name]))
    if column is None:
        raise DataError(
            "the reward function returned no such key",
            key=KEY,
            got=metric,
            allowed=["null for the reward", *numeric_keys],
            fix=suggest(str(metric), numeric_keys) or "Return it from compute_score, in a dict next to 'score'.",
        )
    if not is_numeric(column):
        example = next((value for value in column if value is not None and not is_numeric([value])), None)
        raise DataError(f"groups are filtered by numbers, and {metric!r} is {example!r}", key=KEY, allowed=numeric_keys)
    return np.array([np.nan if value is None else float(value) for value in column])


def share_without_advantage(samples: DataProto) -> float:
    """The share of groups of which no token has an advantage, so they contribute no gradient."""
    groups = group_numbers(samples)
    taught = samples.tensors["advantages"].ne(0).any(dim=-1).numpy()
    return 1.0 - float((np.bincount(groups, weights=taught) > 0).mean())


def accuracies(samples: DataProto) -> np.ndarray:
    """(B,) float64: what the scorer returned as ``acc``, else the score; NaN where a sample has none."""
    return outcomes(samples, ACCURACY if ACCURACY in samples.non_tensor_batch else None)


def chosen_rows(samples: DataProto, kept: int, ctx: StepContext) -> np.ndarray:
    """(B,) bool: the rows of ``kept`` prompts, of those that pass the filters, then of the earliest others."""
    data = ctx.config.data
    uids = samples.non_tensor_batch["uid"].astype(str)
    _, first, groups = np.unique(uids, return_index=True, return_inverse=True)
    liked = np.ones(len(first), dtype=bool)
    if data.filter_accuracy:
        rate = group_means(groups, accuracies(samples), out_of_statistics(samples))
        low, high = data.accuracy_lower_bound - ROUNDING, data.accuracy_upper_bound + ROUNDING
        liked &= (low <= rate) & (rate <= high)  # false for NaN
    if data.filter_truncate and "finish_reason" in samples.non_tensor_batch:
        cut = samples.non_tensor_batch["finish_reason"] == CUT_OFF
        liked &= np.bincount(groups, weights=cut) == 0
    selected = np.lexsort((first, ~liked))[:kept]
    ctx.metrics.add("training/oversampling/liked_prompts", int(liked.sum()), "sum")
    ctx.metrics.add("training/oversampling/filled_prompts", int((~liked[selected]).sum()), "sum")
    return np.isin(groups, selected)
