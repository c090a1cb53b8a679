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
from typing import Any, NamedTuple, Protocol

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
    """A few rows of a micro-batch in at least float32; every (b, T) tensor but `uncleaned` is 0 outside the mask.

    A block is computed for one call of one loss, which may use its tensors as scratch memory.

    Args:
        log_ratio: log_prob - old_log_prob, bounded at +-20.
        highest: the greatest of them before the bound, 0 outside the mask included.
        uncleaned: the log_prob and the old_log_prob that the loss got, to be read only.
        advantages: as the loss got them.
        mask: 0 or 1, of the same dtype.
        lengths: (b, 1) valid tokens per row, at least 1.
        num_tokens: valid tokens of the block.
        weights: importance weights, or None; to be read only.
        survey: what the loss's `survey` found out about the whole micro-batch, or None.
        bounded: whether the bound changed a log-ratio.
    """

    log_ratio: Tensor
    highest: float
    uncleaned: tuple[Tensor, Tensor]
    advantages: Tensor
    mask: Tensor
    lengths: Tensor
    num_tokens: Tensor
    weights: Tensor | None = None
    survey: Any = None
    bounded: bool = False

    @functools.cached_property
    def log_prob(self) -> Tensor:
        """The new policy's log-probabilities, for losses that need more of them than the ratio."""
        return cleaned(self.uncleaned[0], self.mask)

    @functools.cached_property
    def old_log_prob(self) -> Tensor:
        """The old policy's."""
        return cleaned(self.uncleaned[1].to(self.mask.dtype), self.mask)

    def ratio(self) -> Tensor:
        """exp(log_ratio): 1 outside the mask, and exactly 1 where the policy has not moved."""
        return exp(self.log_ratio)

    def into_ratio(self) -> Tensor:
        """The same in the memory of ``log_ratio``, which is gone then."""
        return exp_(self.log_ratio)


def exp(values: Tensor) -> Tensor:
    """The exponential; in float32 by powers of 2, three times as fast on a CPU.

    The product rounds by 6e-8 times |value|, less than log-probabilities are rounded themselves.
    """
    return values.exp() if values.dtype == torch.float64 else (values * LOG2_E).exp2_()


def exp_(values: Tensor) -> Tensor:
    """`exp` in place."""
    return values.exp_() if values.dtype == torch.float64 else values.mul_(LOG2_E).exp2_()


class Changes(NamedTuple):
    """Tokens that may cost something else once the whole micro-batch has been seen; one-dimensional tensors.

    Args:
        where: positions in the flattened block, ascending; the kernel makes them positions in the micro-batch.
        loss, slope: what is added to the token's loss and slope if it is chosen; the kernel scales both.
        key: what the choice goes by, if it is not chance.
    """

    where: Tensor
    loss: Tensor
    slope: Tensor
    key: Tensor | None = None


class Terms(NamedTuple):
    """What a loss makes of a block.

    Args:
        loss: (b, T) the loss of each token, or (b, 1) that of each row; None where it is ``slope * log_prob``.
        slope: (b, T) its derivative with respect to the token's log_prob. Both are 0 outside the mask.
        sums: metric -> its sum over the valid tokens.
        changes: see `Changes`; only of a loss with a `Survey`.
    """

    loss: Tensor | None
    slope: Tensor
    sums: Mapping[str, Tensor] = {}
    changes: Changes | None = None


class Survey(Protocol):
    """What a loss has to know of a whole micro-batch: looked at before the blocks, and again after them."""

    def collect(self, changes: Changes) -> None:
        """Remember the proposed changes of a block; blocks come in order."""
        ...

    def chosen(self) -> tuple[Changes | None, Mapping[str, float]]:
        """The changes to make, and sums of metrics, after the last block."""
        ...


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

    def block(self, rows: slice, survey: Survey | None = None) -> Block:
        """The cleaned rows."""
        mask = float_mask(self.response_mask[rows], self.dtype)
        new, old = self.log_prob[rows].to(self.dtype), self.old_log_prob[rows]
        log_ratio = torch.sub(new, old).mul_(mask)
        lowest, highest = _extremes(log_ratio)
        if not math.isfinite(highest - lowest):  # junk in the padding, or an infinite move
            log_ratio = zero_outside(new - old, mask)
            lowest, highest = _extremes(log_ratio)
        bounded = not (lowest >= -LOG_RATIO_BOUND and highest <= LOG_RATIO_BOUND)
        if bounded:
            log_ratio.clamp_(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        weights, lengths = self.rollout_is_weights, mask.sum(dim=-1, keepdim=True)
        return Block(
            log_ratio=log_ratio,
            highest=highest,
            uncleaned=(new, old),
            advantages=cleaned(self.advantages[rows].to(self.dtype), mask),
            mask=mask,
            lengths=lengths.clamp(min=1.0),
            num_tokens=lengths.sum(),
            weights=None if weights is None else cleaned(weights[rows].to(self.dtype), mask),
            survey=survey,
            bounded=bounded,
        )


def _extremes(values: Tensor) -> tuple[float, float]:
    if values.numel() == 0:
        return 0.0, 0.0
    lowest, highest = torch.stack(torch.aminmax(values)).tolist()
    return lowest, highest


TermsFn = Callable[[Block, Any], Terms]
SurveyFn = Callable[[Inputs, Any], Survey]


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
    survey: Survey | None = None,
    own_weights: bool = False,
) -> tuple[Tensor, dict[str, Metric]]:
    """Value, gradient and metrics of a loss in one pass.

    Args:
        slope_out: (b, T), contiguous, receives the derivative of the value with respect to ``inputs.log_prob``.
        survey: see `Survey`.
        own_weights: the terms hold the importance weights already.
    """
    scale = share_scale(loss_agg_mode, norm, inputs.log_prob.shape[1])
    totals, numbers = [slope_out.new_zeros((), dtype=torch.float64)], []
    names: tuple[str, ...] = ()
    for rows in row_blocks(inputs.log_prob):
        block = inputs.block(rows, survey)
        basic = block.num_tokens, block.log_ratio.sum()  # before the loss uses the memory
        found = terms(block, config)
        factor: Tensor | float = scale / block.lengths if loss_agg_mode == "seq-mean-token-mean" else scale
        if block.weights is not None and not own_weights:
            factor = block.weights * factor
        totals.append(_add_up(found, factor, block, slope_out[rows]))
        if survey is not None and found.changes is not None:
            survey.collect(_scaled(found.changes, factor, rows.start, inputs.log_prob.shape[1]))
        names = tuple(found.sums)
        numbers.append(torch.stack([*basic, *found.sums.values()]))
    num_tokens, moved, *others = torch.stack(numbers).double().sum(dim=0).tolist() if numbers else (0.0, 0.0)
    sums = {"pg_clipfrac": 0.0, "pg_clipfrac_lower": 0.0, "ppo_kl": -moved, **dict(zip(names, others))}
    if survey is not None:
        changes, more = survey.chosen()
        sums |= more
        if changes is not None:
            totals.append(changes.loss.double().sum())
            slope_out.view(-1)[changes.where] += changes.slope.to(slope_out.dtype)
    metrics = {name: Metric(value / (num_tokens or 1.0), "mean", num_tokens) for name, value in sums.items()}
    return torch.stack(totals).sum().to(inputs.dtype), metrics


def _add_up(found: Terms, factor: Tensor | float, block: Block, slope_out: Tensor) -> Tensor:
    """The scaled loss of a block, in float64; its scaled slope goes into ``slope_out``."""
    slope = torch.mul(found.slope, factor, out=slope_out if slope_out.dtype == found.slope.dtype else None)
    if slope is not slope_out:
        slope_out.copy_(slope)
    if found.loss is not None:
        by_row = isinstance(factor, float) or factor.shape[1] == 1
        loss = found.loss.sum(dim=-1, keepdim=True) if by_row else found.loss
        return (loss * factor).double().sum()
    if slope.device.type == "cpu":
        total = torch.linalg.vecdot(slope, block.uncleaned[0]).double().sum()
        if math.isfinite(total.item()):  # else there is junk in the padding
            return total
    return torch.linalg.vecdot(slope, block.log_prob).double().sum()


def _scaled(changes: Changes, factor: Tensor | float, first_row: int, width: int) -> Changes:
    """The changes in units of the value, at their positions in the micro-batch."""
    if isinstance(factor, Tensor):
        factor = factor.expand(-1, width)[changes.where // width, changes.where % width]
    where = changes.where + first_row * width
    return Changes(where, changes.loss * factor, changes.slope * factor, changes.key)


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
        survey: makes the `Survey` of a micro-batch, for a loss that depends on more of it than a few rows.
        own_weights: the terms apply the importance weights themselves.
    """

    def __init__(
        self,
        terms: TermsFn,
        agg_mode: str = "token-mean",
        forced_agg_mode: str | None = None,
        survey: SurveyFn | None = None,
        own_weights: bool = False,
    ):
        self.terms, self.survey, self.own_weights = terms, survey, own_weights
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
            survey = None if self.survey is None else self.survey(inputs, config)
            slope = torch.empty_like(log_prob, memory_format=torch.contiguous_format)
            loss, metrics = evaluate(self.terms, inputs, config, mode, norm, slope, survey, self.own_weights)
        return _Evaluated.apply(log_prob, loss, slope), metrics


def policy_loss(**options: Any) -> Callable[[TermsFn], PolicyLoss]:
    """Decorator: make a policy loss of a function of blocks; options as in `PolicyLoss`."""
    return lambda terms: PolicyLoss(terms, **options)
