"""What all policy losses share: inputs without junk, the ratio, importance weights, aggregation and metrics.

A loss is a formula ``(tokens, config) -> (loss, means)``: it says what each token costs; autograd differentiates it.
Shapes: b rows of a micro-batch, T response tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl.algorithms.aggregation import LossNorm, agg_loss, token_means
from verl.algorithms.calls import check_shapes
from verl.algorithms.masked import zero_outside
from verl.config.schema.actor import ActorConfig
from verl.metrics import Metric

LOG_RATIO_BOUND = 20.0
NOTHING_CLIPPED = {"pg_clipfrac": 0.0, "pg_clipfrac_lower": 0.0}


@dataclass(frozen=True)
class Tokens:
    """A micro-batch as a formula reads it: (b, T) tensors of one dtype, at least float32, 0 outside the mask.

    Args:
        log_prob: the new policy's, the only tensor with a gradient.
        old_log_prob, advantages: as the loss got them.
        mask: bool.
        weights: importance weights, or None.
    """

    log_prob: Tensor
    old_log_prob: Tensor
    advantages: Tensor
    mask: Tensor
    weights: Tensor | None

    @classmethod
    def of(
        cls, log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, mask: Tensor, weights: Tensor | None
    ) -> Tokens:
        """Clean the inputs of a loss.

        Raises:
            ValueError: tensors of different shapes.
        """
        tensors = {"log_prob": log_prob, "old_log_prob": old_log_prob, "advantages": advantages}
        optional = {} if weights is None else {"rollout_is_weights": weights}
        check_shapes({**tensors, "response_mask": mask, **optional})
        dtype = functools.reduce(torch.promote_types, [x.dtype for x in tensors.values()], torch.float32)
        clean = {name: zero_outside(x.to(dtype), mask) for name, x in {**tensors, **optional}.items()}
        constant = {name: x.detach() for name, x in clean.items()}
        return cls(
            log_prob=clean["log_prob"],
            old_log_prob=constant["old_log_prob"],
            advantages=constant["advantages"],
            mask=mask.bool(),
            weights=constant.get("rollout_is_weights"),
        )

    @functools.cached_property
    def lengths(self) -> Tensor:
        """(b, 1): the valid tokens of each row, at least 1."""
        return self.mask.sum(dim=-1, keepdim=True).clamp(min=1).to(self.log_prob.dtype)

    @functools.cached_property
    def zero(self) -> Tensor:
        """(b, T): 0 with the gradient of ``log_prob``, so that ``constant + zero`` moves as the log-prob does."""
        return (self.log_prob - self.log_prob.detach()).nan_to_num(0.0)

    @functools.cached_property
    def log_ratio(self) -> Tensor:
        """(b, T): log_prob - old_log_prob, bounded at +-20; the bound does not stop the gradient."""
        distance = self.log_prob.detach() - self.old_log_prob
        return distance.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND) + self.zero

    @functools.cached_property
    def ratio(self) -> Tensor:
        """(b, T): new over old probability, exactly 1 where the policy has not moved."""
        return self.log_ratio.exp()

    def row_mean(self, values: Tensor) -> Tensor:
        """(b, T) that is 0 outside the mask -> (b, 1)."""
        return values.sum(dim=-1, keepdim=True) / self.lengths


Formula = Callable[[Tokens, Any], tuple[Tensor, Mapping[str, Tensor]]]


def policy_loss(
    agg_mode: str = "token-mean", forced_agg_mode: str | None = None, own_weights: bool = False
) -> Callable[[Formula], Callable[..., tuple[Tensor, dict[str, Metric]]]]:
    """Decorator: make a policy loss of a formula.

    The formula returns the loss of each token, (b, T), and a mapping metric -> (b, T) of which the mean over the valid
    tokens is reported.

    Args:
        agg_mode: the aggregation without a configured one.
        forced_agg_mode: the aggregation that belongs to this loss, whatever is configured.
        own_weights: the formula applies the importance weights itself.
    """

    def decorate(formula: Formula) -> Callable[..., tuple[Tensor, dict[str, Metric]]]:
        def loss_fn(
            old_log_prob: Tensor,
            log_prob: Tensor,
            advantages: Tensor,
            response_mask: Tensor,
            loss_agg_mode: str | None = None,
            config: ActorConfig | None = None,
            rollout_is_weights: Tensor | None = None,
            norm: LossNorm | None = None,
        ) -> tuple[Tensor, dict[str, Metric]]:
            tokens = Tokens.of(log_prob, old_log_prob, advantages, response_mask, rollout_is_weights)
            loss, means = formula(tokens, config)
            if tokens.weights is not None and not own_weights:
                loss = loss * tokens.weights
            metrics = token_means({"ppo_kl": -tokens.log_ratio, **means}, response_mask)
            unclipped = {name: Metric(0.0, "mean", metrics["ppo_kl"].weight) for name in NOTHING_CLIPPED}
            mode = forced_agg_mode or loss_agg_mode or agg_mode
            return agg_loss(loss, response_mask, mode, norm), unclipped | metrics

        functools.update_wrapper(loss_fn, formula, assigned=("__module__", "__name__", "__qualname__", "__doc__"))
        del loss_fn.__wrapped__  # type: ignore[attr-defined]
        vars(loss_fn)["forced_agg_mode"] = forced_agg_mode
        return loss_fn

    return decorate
