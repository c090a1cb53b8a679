"""What all policy losses share: cleaning, aggregation, importance weights, metrics, and one pass over memory.

A loss says for a few rows what a token costs and how that changes with its log-probability. Every formula of the
library is written down with its derivative, so no graph is recorded: value and gradient come out of the same pass,
block by block (see `verl.algorithms.blocks`). Tests hold each derivative against finite differences and autograd.
Shapes: b rows, T tokens.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from verl.algorithms.aggregation import LossNorm, check_agg_mode, loss_norm, running_norm, share_scale
from verl.algorithms.blocks import cleaned, float_mask, row_blocks
from verl.algorithms.calls import check_shapes
from verl.algorithms.masked import zero_outside
from verl.metrics import Metric
from verl.registry import load_object

LOG_RATIO_BOUND = 20.0
LOG2_E = math.log2(math.e)


@dataclass
class Block:
    """A few rows of a micro-batch in at least float32; every (b, T) tensor is 0 outside the mask.

    Args:
        log_ratio: log_prob - old_log_prob, bounded at +-20.
        uncleaned: the log_prob that the loss got.
        advantages: as the loss got them.
        mask: 0 or 1, of the same dtype.
        lengths: (b, 1) valid tokens per row, at least 1.
        weights: importance weights, or None.
        chosen: positions in the flattened block that the loss's `select` picked, or None.
    """

    log_ratio: Tensor
    uncleaned: Tensor
    advantages: Tensor
    mask: Tensor
    lengths: Tensor
    weights: Tensor | None = None
    chosen: Tensor | None = None

    @functools.cached_property
    def log_prob(self) -> Tensor:
        """The new policy's log-probabilities, for losses that need more of them than the ratio."""
        return cleaned(self.uncleaned, self.mask)

    def ratio(self) -> Tensor:
        """exp(log_ratio): 1 outside the mask, and exactly 1 where the policy has not moved."""
        return exp(self.log_ratio)


def exp(values: Tensor) -> Tensor:
    """The exponential; in float32 by powers of 2, three times as fast on a CPU.

    The product rounds by 6e-8 times |value|, less than log-probabilities are rounded themselves.
    """
    return values.exp() if values.dtype == torch.float64 else (values * LOG2_E).exp2_()


class Terms(NamedTuple):
    """What a loss makes of a block.

    Args:
        loss: (b, T) the loss of each token, or (b, 1) that of each row.
        slope: (b, T) its derivative with respect to the token's log_prob. Both are 0 outside the mask.
        sums: metric -> its sum over the valid tokens.
    """

    loss: Tensor
    slope: Tensor
    sums: Mapping[str, Tensor] = {}


@dataclass(frozen=True)
class Inputs:
    """The tensors of a call, (b, T) each; read block by block."""

    old_log_prob: Tensor
    log_prob: Tensor
    advantages: Tensor
    response_mask: Tensor
    rollout_is_weights: Tensor | None = None

    def __post_init__(self) -> None:
        check_shapes({name: tensor for name, tensor in vars(self).items() if tensor is not None})

    @property
    def dtype(self) -> torch.dtype:
        """float64 if any of them is, else float32."""
        tensors = (self.log_prob, self.old_log_prob, self.advantages)
        return functools.reduce(torch.promote_types, [x.dtype for x in tensors], torch.float32)

    def block(self, rows: slice, chosen: Tensor | None = None) -> Block:
        """The cleaned rows; ``chosen`` are sorted positions in the flattened micro-batch."""
        mask = float_mask(self.response_mask[rows], self.dtype)
        new = self.log_prob[rows].to(self.dtype)
        old = self.old_log_prob[rows]
        log_ratio = torch.sub(new, old).mul_(mask)
        if not math.isfinite(log_ratio.sum().item()):  # junk in the padding, or an infinite move
            log_ratio = zero_outside(new - old, mask)
        log_ratio.clamp_(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        weights = self.rollout_is_weights
        return Block(
            log_ratio,
            new,
            cleaned(self.advantages[rows].to(self.dtype), mask),
            mask,
            mask.sum(dim=-1, keepdim=True).clamp_(min=1.0),
            None if weights is None else cleaned(weights[rows].to(self.dtype), mask),
            None if chosen is None else _inside(chosen, rows, self.response_mask.shape[1]),
        )


def _inside(chosen: Tensor, rows: slice, width: int) -> Tensor:
    ends = torch.tensor([rows.start * width, rows.stop * width], device=chosen.device)
    first, last = torch.searchsorted(chosen, ends).tolist()
    return chosen[first:last] - rows.start * width


TermsFn = Callable[[Block, Any], Terms]
SelectFn = Callable[[Inputs, Any], Tensor]


def count_above(left: Tensor, right: Tensor) -> Tensor:
    """In how many places ``left > right``."""
    return torch.gt(left, right, out=torch.empty_like(left)).sum()


def evaluate(
    terms: TermsFn,
    inputs: Inputs,
    config: Any,
    loss_agg_mode: str,
    norm: LossNorm,
    slope_out: Tensor,
    chosen: Tensor | None = None,
    own_weights: bool = False,
) -> tuple[Tensor, dict[str, Metric]]:
    """Value, gradient and metrics of a loss in one pass.

    Args:
        slope_out: (b, T) receives the derivative of the value with respect to ``inputs.log_prob``.
        chosen: see `Inputs.block`.
        own_weights: the terms hold the importance weights already.
    """
    scale = share_scale(loss_agg_mode, norm, inputs.log_prob.shape[1])
    totals, numbers = [slope_out.new_zeros((), dtype=torch.float64)], []
    names: tuple[str, ...] = ()
    for rows in row_blocks(inputs.log_prob):
        block = inputs.block(rows, chosen)
        found = terms(block, config)
        loss, slope = found.loss, found.slope
        if block.weights is not None and not own_weights:
            loss, slope = loss * block.weights, slope * block.weights
        share: Tensor | float = scale / block.lengths if loss_agg_mode == "seq-mean-token-mean" else scale
        if slope_out.dtype == slope.dtype:
            torch.mul(slope, share, out=slope_out[rows])
        else:
            slope_out[rows] = slope * share
        totals.append((loss.sum(dim=-1, keepdim=True) * share).double().sum())
        names = tuple(found.sums)
        numbers.append(torch.stack([block.mask.sum(), block.log_ratio.sum(), *found.sums.values()]))
    num_tokens, moved, *others = torch.stack(numbers).double().sum(dim=0).tolist() if numbers else (0.0, 0.0)
    sums = {"pg_clipfrac": 0.0, "pg_clipfrac_lower": 0.0, "ppo_kl": -moved, **dict(zip(names, others))}
    metrics = {name: Metric(value / (num_tokens or 1.0), "mean", num_tokens) for name, value in sums.items()}
    return torch.stack(totals).sum().to(inputs.dtype), metrics


class _Evaluated(torch.autograd.Function):
    """Joins a value and its known derivative to the graph of ``log_prob``."""

    @staticmethod
    def forward(ctx: Any, log_prob: Tensor, loss: Tensor, slope: Tensor) -> Tensor:
        ctx.save_for_backward(slope)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (slope,) = ctx.saved_tensors
        is_one = grads[0].device.type == "cpu" and grads[0].item() == 1.0
        return (slope if is_one else slope * grads[0].to(slope.dtype)), None, None


class PolicyLoss:
    """A built-in policy loss: what a decorated function of blocks becomes.

    Call form: ``(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None,
    rollout_is_weights=None, norm=None) -> (loss, metrics)``; tensors are (b, T), gradient flows into ``log_prob``,
    ``config`` is the actor's section (None takes defaults), ``norm`` as in `aggregation.agg_loss`. Metrics are means
    over valid tokens: ``ppo_kl``, ``pg_clipfrac``, ``pg_clipfrac_lower``, and what the loss adds.

    Args:
        terms: value and slope per token of a block.
        agg_mode: the aggregation without a configured one.
        forced_agg_mode: the aggregation that belongs to this loss, whatever is configured.
        select: picks tokens from the whole micro-batch beforehand: flat positions, sorted.
        own_weights: the terms apply the importance weights themselves.
    """

    def __init__(
        self,
        terms: TermsFn,
        agg_mode: str = "token-mean",
        forced_agg_mode: str | None = None,
        select: SelectFn | None = None,
        own_weights: bool = False,
    ):
        self.terms, self.select, self.own_weights = terms, select, own_weights
        self.agg_mode, self.forced_agg_mode = agg_mode, forced_agg_mode
        functools.update_wrapper(self, terms)
        self.__signature__ = inspect.signature(type(self).__call__.__get__(self))

    def __repr__(self) -> str:
        return f"{self.__module__}.{self.terms.__name__}"

    def __reduce__(self) -> tuple[Callable[[str], Any], tuple[str]]:
        return load_object, (f"{self.__module__}:{self.terms.__name__}",)  # the same object in another process

    def __call__(
        self,
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str | None = None,
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
        norm: LossNorm | None = None,
    ) -> tuple[Tensor, dict[str, Metric]]:
        mode = self.forced_agg_mode or loss_agg_mode or self.agg_mode
        check_agg_mode(mode)
        norm = norm or running_norm() or loss_norm(response_mask)
        with torch.no_grad():
            inputs = Inputs(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
            chosen = None if self.select is None else self.select(inputs, config)
            slope = torch.empty_like(log_prob, memory_format=torch.contiguous_format)
            loss, metrics = evaluate(self.terms, inputs, config, mode, norm, slope, chosen, self.own_weights)
        return _Evaluated.apply(log_prob, loss, slope), metrics


def policy_loss(**options: Any) -> Callable[[TermsFn], PolicyLoss]:
    """Decorator: make a policy loss of a function of blocks; options as in `PolicyLoss`."""
    return lambda terms: PolicyLoss(terms, **options)
