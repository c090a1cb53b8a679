"""How a loss per token becomes one number: the five modes, normalised over the whole mini-batch.

A mini-batch is cut into micro-batches and spread over ranks, and neither cut may show in the result. So the denominator
is counted once, over everything (`loss_norm`), and each micro-batch contributes its numerator over that denominator,
times the number of ranks because the backend averages gradients over ranks. Shapes: b rows of a micro-batch, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from verl.algorithms.masked import masked_mean, masked_sum
from verl.errors import ConfigError, suggest
from verl.metrics import Metric

LossAggMode = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
LOSS_AGG_MODES: tuple[str, ...] = get_args(LossAggMode)


@dataclass(frozen=True, kw_only=True)
class LossNorm:
    """What is known of a mini-batch as one: its denominators, counted over all its micro-batches and ranks.

    Args:
        num_tokens: valid tokens.
        num_sequences: rows with at least one valid token.
        dp_size: ranks over which the backend averages gradients.
        loss_scale_factor: the constant length that ``seq-mean-token-sum-norm`` divides by.
        mean_weight: the mean importance weight, where the loss asks for it (`verl.algorithms.losses.mean_weight`).
        shares: (b,) of the rows of the micro-batch: the share of each in the valid tokens of its sequence, where a
            sequence is cut into several rows (several trajectories of a sample); None: each row is a sequence.
    """

    num_tokens: float
    num_sequences: float
    dp_size: int = 1
    loss_scale_factor: float | None = None
    mean_weight: float | None = None
    shares: Tensor | None = None


def loss_norm(
    response_mask: Tensor,
    dp_size: int = 1,
    loss_scale_factor: float | None = None,
    all_reduce: Callable[[Tensor], Tensor] | None = None,
    shares: Tensor | None = None,
) -> LossNorm:
    """Count this rank's part of a mini-batch, and sum the counts over the data-parallel ranks.

    Args:
        response_mask: (B, T) of this rank's whole part, before it is cut into micro-batches.
        loss_scale_factor: None takes T; a run passes its configured response length, because T depends on the batch.
        all_reduce: sums a tensor of two numbers over the data-parallel ranks (each token counted once, so not over
            tensor, sequence or pipeline ranks); None on a single rank.
        shares: (B,) as in `LossNorm`; those of a sequence sum to 1.
    """
    mask = response_mask.bool()
    sequences_here = mask.any(dim=-1) if shares is None else shares.double()
    counts = torch.stack([mask.sum().double(), sequences_here.sum().double()])
    if all_reduce is not None:
        counts = all_reduce(counts)
    tokens, sequences = counts.tolist()
    scale = float(mask.shape[-1]) if loss_scale_factor is None else float(loss_scale_factor)
    return LossNorm(num_tokens=tokens, num_sequences=sequences, dp_size=dp_size, loss_scale_factor=scale)


def check_agg_mode(mode: str, key: str = "loss_agg_mode") -> None:
    """Raise `ConfigError` unless ``mode`` is one of the five."""
    if mode not in LOSS_AGG_MODES:
        raise ConfigError(
            "unknown loss aggregation", key=key, got=mode, allowed=LOSS_AGG_MODES, fix=suggest(mode, LOSS_AGG_MODES)
        )


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    norm: LossNorm | None = None,
    compat_sum_norm: bool = False,
) -> Tensor:
    """One micro-batch's share of the mini-batch loss; shares are summed over micro-batches and averaged over ranks.

    With n_i the valid tokens of row i, N the valid tokens and S the rows that have any, over the whole mini-batch::

        token-mean               sum x / N               (DAPO, arXiv 2503.14476)
        token-sum                sum x
        seq-mean-token-sum       sum x / S
        seq-mean-token-mean      sum_i (sum_t x / n_i) / S   (GRPO, arXiv 2402.03300)
        seq-mean-token-sum-norm  sum x / (loss_scale_factor * S)   (Dr. GRPO, arXiv 2503.20783)

    Args:
        loss_mat, loss_mask: (b, T).
        norm: None takes the norm of the running optimizer step (see `normalised_by`), else counts this micro-batch.
        compat_sum_norm: ``seq-mean-token-sum-norm`` without the division by S, to compare numbers with upstream.
    """
    check_agg_mode(loss_agg_mode)
    norm = norm or running_norm() or loss_norm(loss_mask)
    if loss_agg_mode == "seq-mean-token-mean":
        lengths = loss_mask.bool().sum(dim=-1).clamp(min=1)
        means = masked_sum(loss_mat, loss_mask, axis=-1) / lengths
        total = (means if norm.shares is None else means * norm.shares).sum()
    else:
        total = masked_sum(loss_mat, loss_mask)
    return total * share_scale(loss_agg_mode, norm, loss_mat.shape[-1], compat_sum_norm)


def share_scale(loss_agg_mode: str, norm: LossNorm, width: int, compat_sum_norm: bool = False) -> float:
    """What `agg_loss` multiplies a micro-batch's numerator by: ranks over the denominator of the mini-batch."""
    sequences = 1.0 if compat_sum_norm else norm.num_sequences
    denominator = {
        "token-mean": norm.num_tokens,
        "token-sum": 1.0,
        "seq-mean-token-sum": norm.num_sequences,
        "seq-mean-token-mean": norm.num_sequences,
        "seq-mean-token-sum-norm": sequences * (norm.loss_scale_factor or width),
    }[loss_agg_mode]
    # A mini-batch without a valid token has a zero numerator: it keeps its graph, so that every rank runs backward.
    return norm.dp_size / (denominator or 1.0)


def loss_metric(loss: float, loss_mask: Tensor, loss_agg_mode: str, norm: LossNorm) -> Metric:
    """An aggregated share as a metric that merges to the value of the whole mini-batch.

    It is a weighted mean, so that merging over micro-batches, ranks and optimizer steps needs no knowledge of how many
    there were. ``token-sum`` has no denominator and stays a sum.
    """
    mask = loss_mask.bool()
    if loss_agg_mode == "token-sum":
        return Metric(loss / norm.dp_size, "sum")
    if loss_agg_mode == "token-mean":
        here, everywhere = float(mask.sum()), norm.num_tokens
    else:
        sequences = mask.any(dim=-1) if norm.shares is None else norm.shares
        here, everywhere = float(sequences.sum()), norm.num_sequences
    return Metric(loss / norm.dp_size * everywhere / here if here else 0.0, "mean", here)


@torch.no_grad()
def token_means(values: Mapping[str, Tensor], loss_mask: Tensor) -> dict[str, Metric]:
    """Means over the valid tokens, weighted by their number; one transfer from the device for all of them.

    Args:
        values: name -> (b, T), of any dtype.
    """
    means = [masked_mean(value.detach(), loss_mask).float() for value in values.values()]
    *numbers, count = torch.stack([*means, loss_mask.bool().sum().to(means[0])]).tolist()
    return {name: Metric(number, "mean", count) for name, number in zip(values, numbers)}


@dataclass
class RunningNorm:
    """The norm of the optimizer step that is being computed, and whether an aggregation used it."""

    norm: LossNorm
    used: bool = False


_running: ContextVar[RunningNorm | None] = ContextVar("running_norm", default=None)


@contextmanager
def normalised_by(norm: LossNorm) -> Iterator[RunningNorm]:
    """Inside, `agg_loss` without a norm is normalised by this one.

    A loss written for upstream calls ``agg_loss(loss_mat, loss_mask, mode)`` and knows nothing of `LossNorm`; it is
    normalised over the mini-batch all the same.
    """
    running = RunningNorm(norm)
    token = _running.set(running)
    try:
        yield running
    finally:
        _running.reset(token)


def running_norm() -> LossNorm | None:
    """The norm of `normalised_by`, which counts as used from now on; None outside an optimizer step."""
    running = _running.get()
    if running is None:
        return None
    running.used = True
    return running.norm
