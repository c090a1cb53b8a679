"""Log-probabilities and entropies of next tokens from logits.

Both are computed in float32 (or float64) whatever the logits' dtype is. The temperature is the caller's: logits come in
divided by it. Shapes: ... any leading dimensions, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from verl.algorithms.masked import at_least_float32
from verl.device import AutogradContext


class ChosenLogProbs(torch.autograd.Function):
    """(N, V) logits in float32 or float64 and (N,) labels -> (N,), through one exponential per logit.

    The probabilities are all that is kept: d log softmax(z)[label] / dz = onehot(label) - softmax(z).
    """

    @staticmethod
    def forward(ctx: AutogradContext, z: Tensor, labels: Tensor, overwrite: bool) -> Tensor:
        probabilities = torch.softmax(z, dim=-1)
        label_probs = probabilities.gather(-1, labels[:, None]).squeeze(-1)
        log_probs = label_probs.log()
        # A probability too small for its dtype has lost digits or is 0, and its logarithm with it.
        rare = (label_probs < torch.finfo(z.dtype).tiny).nonzero().squeeze(-1)
        if len(rare):
            log_probs[rare] = z[rare, labels[rare]] - torch.logsumexp(z[rare], dim=-1)
        ctx.save_for_backward(probabilities, labels)
        ctx.overwrite = overwrite
        return log_probs

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: AutogradContext, *grads: Tensor) -> tuple[Tensor | None, ...]:
        probabilities, labels = ctx.saved_tensors
        grad = grads[0][:, None]
        slopes = probabilities.mul_(-grad) if ctx.overwrite else probabilities * -grad
        return slopes.scatter_add_(-1, labels[:, None], grad), None, None


def logprobs_from_logits(logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
    """``log softmax(logits)[label]``.

    Args:
        logits: (..., V).
        labels: (...) int64.
        inplace_backward: the backward pass writes the gradient over the probabilities that the forward pass kept, so
            that it can run only once; False takes memory for another V numbers per label. ``logits`` stay as they are.
    """
    z = at_least_float32(logits)
    flat: Tensor = ChosenLogProbs.apply(z.reshape(-1, z.shape[-1]), labels.reshape(-1), inplace_backward)  # type: ignore[no-untyped-call]
    return flat.reshape(labels.shape)


def candidate_log_probs(logits: Tensor, candidates: Tensor) -> Tensor:
    """(..., V) logits and (..., K) int64 tokens -> (..., K): ``log softmax(logits)`` of these tokens."""
    z = at_least_float32(logits)
    return z.gather(-1, candidates) - torch.logsumexp(z, dim=-1, keepdim=True)


def top_k_from_logits(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(..., V) logits -> log-probs (..., K) and int64 ids of the ``k`` most likely tokens; K is at most V."""
    ids = logits.topk(min(k, logits.shape[-1]), dim=-1).indices
    return candidate_log_probs(logits, ids), ids


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
