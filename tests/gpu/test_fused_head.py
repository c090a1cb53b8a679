"""The fused LM head on CUDA: Triton's kernels and torch's tiles against whole logits, memory and time measured."""

from __future__ import annotations

import itertools
import time

import torch

from verl.models.fused_head import Shape, TokenStatistics
from verl.models.fused_head.triton_backend import TritonStatistics

BACKENDS = {"torch": TokenStatistics, "triton": TritonStatistics}


def inputs(tokens: int, vocabulary: int, hidden: int, dtype: torch.dtype, bias: bool = False):
    g = torch.Generator("cuda").manual_seed(0)
    make = {"generator": g, "device": "cuda", "dtype": torch.float32}
    h = torch.randn(tokens, hidden, **make).to(dtype).requires_grad_()
    w = (torch.randn(vocabulary, hidden, **make) * hidden**-0.5).to(dtype).requires_grad_()
    b = torch.randn(vocabulary, **make).to(dtype).requires_grad_() if bias else None
    return h, w, b, torch.randint(0, vocabulary, (tokens,), generator=g, device="cuda")


def naive(h, w, b, labels, shape: Shape, wanted):
    z = (h @ w.t() + (0 if b is None else b)).float() * shape.scale
    if shape.softcap is not None:
        z = torch.tanh(z / shape.softcap) * shape.softcap
    log_p = (z / shape.temperature).log_softmax(-1)
    p = log_p.exp()
    return log_p.gather(1, labels[:, None])[:, 0], -(p * log_p).sum(1), p.square().sum(1)


def test_float32_statistics_and_gradients_are_those_of_whole_logits():
    torch.backends.cuda.matmul.allow_tf32 = False
    shapes = Shape(tile=70_000), Shape(0.7, 0.5, None), Shape(0.9, 2.0, 20.0, tile=300_000)
    for backend, bias, shape in itertools.product(BACKENDS.values(), (False, True), shapes):
        h, w, b, labels = inputs(300, 5003, 128, torch.float32, bias)
        tensors = [h, w, *([b] if bias else [])]
        weights = torch.randn(3, 300, device="cuda")
        found, expected = (f(h, w, b, labels, shape, (True, True)) for f in (backend.apply, naive))
        for a, e in zip(found, expected):
            torch.testing.assert_close(a, e, atol=2e-5, rtol=1e-4)
        losses = [sum((x * y).sum() for x, y in zip(statistics, weights)) for statistics in (found, expected)]
        for a, e in zip(*(torch.autograd.grad(loss, tensors) for loss in losses)):
            assert (a - e).norm() / e.norm() < 1e-5


def test_bf16_is_as_near_to_float32_as_whole_logits_in_bf16():
    h, w, _, labels = inputs(1000, 32_000, 512, torch.bfloat16)
    shape, wanted = Shape(0.8), (True, False)
    exact = naive(h.float(), w.float(), None, labels, shape, wanted)
    error = {}
    for name, function in (("naive", naive), *((name, f.apply) for name, f in BACKENDS.items())):
        found = function(h, w, None, labels, shape, wanted)
        gradient = torch.autograd.grad(found[0].sum() + found[1].sum(), (h, w))
        reference = torch.autograd.grad(exact[0].sum() + exact[1].sum(), (h, w), retain_graph=True)
        error[name] = [float((a.float() - e.float()).norm() / e.float().norm()) for a, e in zip(gradient, reference)]
    for backend in BACKENDS:
        assert all(ours <= 1.2 * theirs for ours, theirs in zip(error[backend], error["naive"])), error


def test_memory_and_time_of_a_large_vocabulary():
    """152k words, 16k tokens, bf16, entropy too: prints what it measured."""
    h, w, _, labels = inputs(16_384, 152_064, 1024, torch.bfloat16)
    measured = {}
    for name, function in (("naive", naive), *((name, f.apply) for name, f in BACKENDS.items())):
        for _ in range(2):  # the first run compiles
            h.grad = w.grad = None
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            held, start = torch.cuda.memory_allocated(), time.perf_counter()
            found = function(h, w, None, labels, Shape(), (True, False))
            (found[0].sum() + 0.01 * found[1].sum()).backward()
            torch.cuda.synchronize()
            seconds = time.perf_counter() - start
            peak = torch.cuda.max_memory_allocated() - held - h.nbytes - w.nbytes
        measured[name] = seconds, peak / 2**20
        del found
        print(f"{name}: {measured[name][0] * 1e3:.0f} ms, {measured[name][1]:.0f} MiB beyond h, W and their gradients")
    for name in BACKENDS:
        assert measured[name][1] * 10 < measured["naive"][1]
