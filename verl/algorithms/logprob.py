"""Log-probabilities and entropies of next tokens from logits.

Both are computed in float32 (or float64) whatever the logits' dtype is. The temperature is the caller's: logits come in
divided by it. Shapes: ... any leading dimensions, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl.algorithms.masked import at_least_float32


def logprobs_from_logits(logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
    """``log softmax(logits)[label]``, through torch's fused cross entropy.

    On CPU its forward and backward together take about half the time of z_label - logsumexp(z).

    Args:
        logits: (..., V).
        labels: (...) int64.
        inplace_backward: upstream's hint to a fused kernel; the result is the same either way.
    """
    z = at_least_float32(logits)
    flat = torch.nn.functional.cross_entropy(z.reshape(-1, z.shape[-1]), labels.reshape(-1), reduction="none")
    return -flat.reshape(labels.shape)


def entropy_from_logits(logits: Tensor) -> Tensor:
    """(..., V) -> (...): ``H = logsumexp(z) - sum_v softmax(z)_v z_v`` in nats; a logit of -inf contributes nothing."""
    z = at_least_float32(logits)
    probabilities = torch.softmax(z, dim=-1)
    expected = (probabilities * z.masked_fill(z == -torch.inf, 0.0)).sum(dim=-1)
    return torch.logsumexp(z, dim=-1) - expected


def entropy_from_logits_with_chunking(logits: Tensor, chunk_size: int = 2048) -> Tensor:
    """The same, ``chunk_size`` positions at a time, so that the peak is a chunk of V numbers and not all of them."""
    flat = logits.reshape(-1, logits.shape[-1])
    parts = [entropy_from_logits(part) for part in flat.split(chunk_size)]
    return torch.cat(parts).reshape(logits.shape[:-1]) if parts else flat.new_zeros(logits.shape[:-1])


def sum_pi_squared_from_logits(logits: Tensor) -> Tensor:
    """(..., V) -> (...): the sum over the vocabulary of the squared probabilities (arXiv 2602.07078)."""
    z = at_least_float32(logits)
    return torch.exp(torch.logsumexp(2 * z, dim=-1) - 2 * torch.logsumexp(z, dim=-1))
