"""Which samples the language-model loss on right answers learns from (VAPO, arXiv 2504.05118), and with what weight.

The loss is the mean over the tokens of the correct answers of a whole mini-batch. Only the controller sees all of it,
so it computes the weights, independently of micro-batches and ranks. Shapes: B rows, T response tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from verl.protocol import DataProto
from verl.trainer.ppo import group_filter

JUDGEMENT = "acc"
"""What a scorer returns next to a score that includes more than correctness, such as a length penalty."""


def marks(samples: DataProto) -> Tensor:
    """(B,) float32: 1 where the answer is right, which is ``acc`` above 0 if the scorer returns it, else the score."""
    metric = JUDGEMENT if JUDGEMENT in samples.non_tensor_batch else None
    right = np.nan_to_num(group_filter.outcomes(samples, metric), nan=0.0) > 0
    return torch.from_numpy(right & ~group_filter.out_of_statistics(samples)).float()


def weigh(mini_batch: DataProto) -> None:
    """Adds positive_lm_weights (B, T): 1 / N on the N tokens of right answers, 0 elsewhere."""
    tensors = mini_batch.tensors
    valid = tensors["response_mask"].float() * tensors["positive"][:, None]
    tensors["positive_lm_weights"] = valid / valid.sum().clamp(min=1.0)
