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
from verl.algorithms.blocks import Scratch, cleaned, extremes, inner_product, row_blocks
from verl.algorithms.calls import check_shapes
from verl.algorithms.masked import zero_outside
from verl.metrics import Metric
from verl.registry import load_object

LOG_RATIO_BOUND = 20.0
LOG2_E = math.log2(math.e)


@dataclass
class Block:
    """A few rows of a micro-batch in at least float32; every (b, T) tensor but `uncleaned` is 0 outside the mask.

    A block is computed for one call of one loss, which may use its tensors as scratch memory and ask for more. The next
    block gets the same memory.

    Args:
        scratch: where `spare` comes from.
        log_ratio: log_prob - old_log_prob, bounded at +-20.
        highest: the greatest of them before the bound, 0 outside the mask included.
        uncleaned: the log_prob and the old_log_prob that the loss got, to be read only.
        advantages: as the loss got them.
        mask: 0 or 1, of the same dtype.
        counts: (b, 1) valid tokens per row.
        weights: importance weights, or None; to be read only.
        bounded: whether the bound changed a log-ratio.
    """

    scratch: Scratch
    log_ratio: Tensor
    highest: float
    uncleaned: tuple[Tensor, Tensor]
    advantages: Tensor
    mask: Tensor
    counts: Tensor
    weights: Tensor | None = None
    bounded: bool = False

    @functools.cached_property
    def lengths(self) -> Tensor:
        """(b, 1) valid tokens per row, at least 1."""
        return self.counts.clamp(min=1.0)

    @functools.cached_property
    def log_prob(self) -> Tensor:
        """The new policy's log-probabilities, for losses that need more of them than the ratio."""
        return cleaned(self.uncleaned[0], self.mask, self.spare())

    @functools.cached_property
    def old_log_prob(self) -> Tensor:
        """The old policy's."""
        return cleaned(self.uncleaned[1].to(self.mask.dtype), self.mask, self.spare())

    def spare(self) -> Tensor:
        """(b, T) to write into, uninitialised."""
        return self.scratch.take()

    def dot_log_prob(self, factors: Tensor) -> Tensor:
        """The sum of log_prob times ``factors``, which are 0 outside the mask."""
        return inner_product(self.uncleaned[0], factors, self.mask)

    def ratio(self) -> Tensor:
        """exp(log_ratio): 1 outside the mask, and exactly 1 where the policy has not moved."""
        return exp(self.log_ratio, self.spare())

    def into_ratio(self) -> Tensor:
        """The same in the memory of ``log_ratio``, which is gone then."""
        return exp_(self.log_ratio)


def exp(values: Tensor, out: Tensor) -> Tensor:
    """The exponential; in float32 by powers of 2, three times as fast on some CPUs.

    The product rounds by 6e-8 times |value|, less than log-probabilities are rounded themselves.
    """
    return torch.exp(values, out=out) if values.dtype == torch.float64 else torch.mul(values, LOG2_E, out=out).exp2_()


def exp_(values: Tensor) -> Tensor:
    """`exp` in place."""
    return exp(values, values)


class Changes(NamedTuple):
    """Tokens that cost something else once the whole micro-batch has been seen; one-dimensional tensors.

    Args:
        where: their positions in the flattened micro-batch, each at most once.
        loss, slope: what is added to a token's loss and slope; the kernel scales both.
        sums: metric -> its sum, as in `Terms`.
    """

    where: Tensor
    loss: Tensor
    slope: Tensor
    sums: Mapping[str, float] = {}


class Means(NamedTuple):
    """Of advantage and log-prob over the valid tokens of the micro-batch, and how many these are."""

    advantage: float
    log_prob: float
    num_tokens: int


class Terms(NamedTuple):
    """What a loss makes of a block.

    Args:
        loss: (b, T) the loss of each token, or (b, 1) that of each row; None where it is ``slope * log_prob``.
        slope: (b, T) its derivative with respect to the token's log_prob. Both are 0 outside the mask.
        sums: metric -> its sum over the valid tokens.
    """

    loss: Tensor | None
    slope: Tensor
    sums: Mapping[str, Tensor | float] = {}


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

    @functools.cached_property
    def dtype(self) -> torch.dtype:
        """float64 if any of them is, else float32."""
        tensors = (self.log_prob, self.old_log_prob, self.advantages)
        return functools.reduce(torch.promote_types, [x.dtype for x in tensors], torch.float32)

    def block(self, rows: slice, scratch: Scratch) -> Block:
        """The cleaned rows, in the memory of ``scratch``."""
        new, old = self.log_prob[rows].to(self.dtype), self.old_log_prob[rows]
        scratch.begin(*new.shape)
        mask = scratch.take().copy_(self.response_mask[rows])
        log_ratio = torch.sub(new, old, out=scratch.take()).mul_(mask)
        lowest, highest = extremes(log_ratio)
        if not math.isfinite(highest - lowest):  # junk in the padding, or an infinite move
            log_ratio = zero_outside(new - old, mask)
            lowest, highest = extremes(log_ratio)
        bounded = not (lowest >= -LOG_RATIO_BOUND and highest <= LOG_RATIO_BOUND)
        if bounded:
            log_ratio.clamp_(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        weights = self.rollout_is_weights
        return Block(
            scratch=scratch,
            log_ratio=log_ratio,
            highest=highest,
            uncleaned=(new, old),
            advantages=cleaned(self.advantages[rows].to(self.dtype), mask, scratch.take()),
            mask=mask,
            counts=mask.sum(dim=-1, keepdim=True),
            weights=None if weights is None else cleaned(weights[rows].to(self.dtype), mask, scratch.take()),
            bounded=bounded,
        )

    def at(self, where: Tensor) -> tuple[Tensor, Tensor]:
        """The bounded log-ratio and the advantage of some valid tokens; positions in the flattened micro-batch."""
        log_ratio = self.log_prob.take(where).to(self.dtype) - self.old_log_prob.take(where)
        return log_ratio.clamp_(-LOG_RATIO_BOUND, LOG_RATIO_BOUND), self.advantages.take(where).to(self.dtype)


Numbers = tuple[Tensor | float, ...]
TermsFn = Callable[[Block, Any], Terms]
ReviseFn = Callable[[Inputs, Means, Any], Changes]


def evaluate(
    loss: PolicyLoss, inputs: Inputs, config: Any, loss_agg_mode: str, norm: LossNorm, slope_out: Tensor
) -> tuple[Tensor, dict[str, Metric]]:
    """Value, gradient and metrics of a loss in one pass; a loss that revises looks at some of the inputs once more.

    Args:
        slope_out: (b, T), contiguous, receives the derivative of the value with respect to ``inputs.log_prob``.
    """
    scale = share_scale(loss_agg_mode, norm, inputs.log_prob.shape[1])
    by_length = loss_agg_mode == "seq-mean-token-mean"
    counts, totals, seen, numbers = list[Tensor](), list[Numbers](), list[Numbers](), list[Numbers]()
    names, scratch = tuple[str, ...](), Scratch(inputs.dtype, inputs.log_prob.device)
    for rows in row_blocks(inputs.log_prob):
        block = inputs.block(rows, scratch)
        counts.append(block.counts)
        if loss.revise is not None:
            seen.append((block.advantages.sum(), block.dot_log_prob(block.mask)))
        moved = block.log_ratio.sum()  # before the loss uses the memory
        found = loss.terms(block, config)
        factor: Tensor | float = scale / block.lengths if by_length else scale
        if block.weights is not None and not loss.own_weights:
            factor = torch.mul(block.weights, factor, out=block.spare())
        totals.append((_add_up(found, factor, block, slope_out[rows]),))
        names = tuple(found.sums)
        numbers.append((moved, *found.sums.values()))
    if not counts:
        counts.append(inputs.log_prob.new_zeros(0, 1))
    lengths = torch.cat(counts)
    num_tokens = lengths.double().sum().item()
    moved_by, *others = column_sums(numbers) or [0.0]
    sums = {"pg_clipfrac": 0.0, "pg_clipfrac_lower": 0.0, "ppo_kl": -moved_by, **dict(zip(names, others))}
    value = sum(column_sums(totals))
    if loss.revise is not None and num_tokens:
        advantage, log_prob = column_sums(seen)
        changes = loss.revise(inputs, Means(advantage / num_tokens, log_prob / num_tokens, int(num_tokens)), config)
        rescale: Tensor | float = scale / lengths[changes.where // inputs.log_prob.shape[1], 0] if by_length else scale
        if inputs.rollout_is_weights is not None:
            rescale = inputs.rollout_is_weights.take(changes.where).to(inputs.dtype) * rescale
        value += (changes.loss * rescale).double().sum().item()
        slope_out.view(-1)[changes.where] += (changes.slope * rescale).to(slope_out.dtype)
        sums |= dict(changes.sums)
    metrics = {name: Metric(number / (num_tokens or 1.0), "mean", num_tokens) for name, number in sums.items()}
    return inputs.log_prob.new_tensor(value, dtype=inputs.dtype), metrics


def column_sums(rows: list[Numbers]) -> list[float]:
    """The sum of each column in float64; numbers and scalar tensors may stand side by side."""
    return [_sum(column) for column in zip(*rows)]


def _sum(values: Numbers) -> float:
    tensors = [value for value in values if isinstance(value, Tensor)]
    on_device = torch.stack(tensors).double().sum().item() if tensors else 0.0
    return on_device + sum(value for value in values if not isinstance(value, Tensor))


def _add_up(found: Terms, factor: Tensor | float, block: Block, slope_out: Tensor) -> Tensor:
    """The scaled loss of a block; its scaled slope goes into ``slope_out``."""
    slope = torch.mul(found.slope, factor, out=slope_out if slope_out.dtype == found.slope.dtype else None)
    if slope is not slope_out:
        slope_out.copy_(slope)
    if found.loss is None:
        return block.dot_log_prob(slope)
    if isinstance(factor, float):
        return found.loss.sum() * factor
    loss = found.loss.sum(dim=-1, keepdim=True) if factor.shape[1] == 1 else found.loss
    return loss.mul_(factor).sum()


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
        revise: changes what some tokens cost after the last block, for a loss that depends on all of a micro-batch.
        own_weights: the terms apply the importance weights themselves.
    """

    def __init__(
        self,
        terms: TermsFn,
        agg_mode: str = "token-mean",
        forced_agg_mode: str | None = None,
        revise: ReviseFn | None = None,
        own_weights: bool = False,
    ):
        self.terms, self.revise, self.own_weights = terms, revise, own_weights
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
            slope = torch.empty_like(log_prob, memory_format=torch.contiguous_format)
            loss, metrics = evaluate(self, inputs, config, mode, norm, slope)
        return _Evaluated.apply(log_prob, loss, slope), metrics


def policy_loss(**options: Any) -> Callable[[TermsFn], PolicyLoss]:
    """Decorator: make a policy loss of a function of blocks; options as in `PolicyLoss`."""
    return lambda terms: PolicyLoss(terms, **options)
