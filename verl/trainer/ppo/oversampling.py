"""More prompts are sampled than are trained on (``data.oversample_factor``), and the instructive ones are preferred.

The online filter of PRIME (arXiv 2502.01456): a prompt that is nearly always or nearly never answered rightly teaches
little. Where too few prompts are liked, others fill the batch, so that a step samples once. Under every schedule the
choice is among the candidates of a chunk, groups that dynamic sampling has left. Shapes: B rows, G prompts.
"""

from __future__ import annotations

import numpy as np

from verl.config import DataConfig, PPOTrainerConfig
from verl.config.rules.oversampling import candidates
from verl.protocol import DataProto
from verl.trainer.ppo import group_filter
from verl.trainer.ppo.context import StepContext

ACCURACY = "acc"
"""What a scorer may return next to the score: how correct a sample is, 0 to 1."""
ROUNDING = 1e-6
CUT_OFF = "length"


def prompts_at_once(data: DataConfig) -> int:
    """Prompts that are sampled together."""
    return data.gen_batch_size or candidates(data, data.train_batch_size)


def key_of_prompts_at_once(config: PPOTrainerConfig) -> str:
    """The setting that says how many, for messages."""
    if config.trainer.v1.trainer_mode == "fully_async":  # where the number of prompts follows from these
        return "async_training.require_batches x actor_rollout_ref.actor.ppo_mini_batch_size"
    return "data.gen_batch_size" if config.data.gen_batch_size else "data.train_batch_size"


def accuracies(samples: DataProto, returned: dict) -> np.ndarray:
    """(B,) float64: what the scorer returned as ``acc``, else the score; NaN where a sample has none."""
    name = ACCURACY if ACCURACY in samples.non_tensor_batch else None
    return group_filter.outcomes(samples, name, returned)


def chosen_rows(samples: DataProto, kept: int, ctx: StepContext) -> np.ndarray:
    """(B,) bool: the rows of ``kept`` prompts, of those that pass the filters, then of the earliest others."""
    data = ctx.config.data
    uids = samples.non_tensor_batch["uid"].astype(str)
    _, first, groups = np.unique(uids, return_index=True, return_inverse=True)
    liked = np.ones(len(first), dtype=bool)
    if data.filter_accuracy:
        rate = _means(groups, accuracies(samples, ctx.sample_info), group_filter.out_of_statistics(samples))
        low, high = data.accuracy_lower_bound - ROUNDING, data.accuracy_upper_bound + ROUNDING
        liked &= (low <= rate) & (rate <= high)  # false for NaN
    if data.filter_truncate and "finish_reason" in samples.non_tensor_batch:
        cut = samples.non_tensor_batch["finish_reason"] == CUT_OFF
        liked &= np.bincount(groups, weights=cut) == 0
    selected = np.lexsort((first, ~liked))[:kept]
    ctx.metrics.add("training/oversampling/liked_prompts", int(liked.sum()), "sum")
    ctx.metrics.add("training/oversampling/filled_prompts", int((~liked[selected]).sum()), "sum")
    return np.isin(groups, selected)


def _means(groups: np.ndarray, values: np.ndarray, left_out: np.ndarray) -> np.ndarray:
    """(G,) float64: the mean of each group's counted values, NaN where it has none."""
    counted = ~left_out & ~np.isnan(values)
    number = np.bincount(groups, weights=counted)
    total = np.bincount(groups, weights=np.where(counted, values, 0.0))
    return np.divide(total, number, out=np.full(len(number), np.nan), where=number > 0)
