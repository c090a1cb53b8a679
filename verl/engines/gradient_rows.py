"""Which rows of a mini-batch go through the model when it is trained: those that a gradient comes from.

On policy, and with neither a KL nor an entropy in the loss, an answer of advantage 0 changes nothing. GRPO has many of
them: all answers of a group that are right, or that are wrong, have one reward. Their share of loss and metrics does
not depend on the policy, so it is computed without a pass, and every number stays what it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from verl.algorithms.aggregation import LossNorm
from verl.algorithms.losses import LossFn, loss_of_rows, without_gradient
from verl.distributed import Ranks
from verl.metrics import Metric
from verl.protocol import DataProto


@dataclass(frozen=True)
class GradientRows:
    """A rank's rows of a mini-batch.

    Args:
        trained: those that go through the model.
        constant: those from which no gradient comes; None where there are none.
        share: of all ranks' tokens, those of constant rows.
    """

    trained: DataProto
    constant: DataProto | None = None
    share: float = 0.0

    @classmethod
    def of(cls, batch: DataProto, loss_fn: LossFn, ranks: Ranks) -> GradientRows:
        """Collective."""

        def find() -> tuple[Tensor, list[int]]:
            constant = torch.tensor(without_gradient(loss_fn, batch.tensors), dtype=torch.bool)
            tokens = batch.tensors["attention_mask"].cpu().sum(-1)
            return constant, [int(tokens[constant].sum()), int(tokens.sum())]

        constant, counts = ranks.together(find)
        skipped, every = map(sum, zip(*counts))
        if not constant.any():
            return cls(batch, share=skipped / (every or 1))
        return cls(batch[~constant], batch[constant], skipped / every)

    def rest(self, loss_fn: LossFn, norm: LossNorm) -> tuple[float, dict[str, Metric]]:
        """The constant rows' share of the loss, and their metrics."""
        if self.constant is None:
            return 0.0, {}
        anything = torch.zeros(self.constant.tensors["response_mask"].shape)
        rows = self.constant.tensors
        loss, metrics = loss_of_rows(loss_fn, {"log_probs": anything}, rows, norm)
        return float(loss), metrics
