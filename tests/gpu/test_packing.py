"""Packed attention on CUDA: the variable-length kernels, forward and backward, against one sequence at a time."""

from __future__ import annotations

import itertools
import math
import tempfile
from pathlib import Path

import torch

from tests.harness.engines import gradients, grouped_batch, make_engine, model_dir, relative_error
from verl.algorithms.losses import PPOPolicyLoss
from verl.config import ActorConfig
from verl.engines.settings import PassSettings
from verl.models.attention import NO_PREFIX, AttentionVariant, Segments, varlen
from verl.models.attention.interface import packed_attention
from verl.models.attention.masked import masked_attention

LAYOUTS = (
    Segments.separate((300, 17, 64, 1), "cuda"),
    Segments((40, 129, 200, 3, 64, 64, 30), (NO_PREFIX, NO_PREFIX, 0, 0, 1, 1, NO_PREFIX), "cuda"),
)


def tensors(segments: Segments, heads: int, kv_heads: int, dim: int, dtype: torch.dtype):
    g = torch.Generator("cuda").manual_seed(0)
    sizes = [(segments.num_tokens, n, dim) for n in (heads, kv_heads, kv_heads)]
    return [torch.randn(size, generator=g, device="cuda").to(dtype).requires_grad_() for size in sizes]


def test_the_kernel_in_torch_is_exact_up_to_bf16():
    for segments, (heads, kv_heads, dim) in itertools.product(LAYOUTS, [(8, 2, 64), (4, 4, 128)]):
        how = AttentionVariant(dim**-0.5)
        given = tensors(segments, heads, kv_heads, dim, torch.bfloat16)
        exact = [x.detach().float().requires_grad_() for x in given]
        upstream = torch.randn(given[0].shape, device="cuda")
        assert varlen.takes_tensors(given[0], given[2])
        found = varlen.FlashVarlen.apply(*given, segments, how.scaling)
        expected = masked_attention(*exact, segments, how)
        assert (found.float() - expected).norm() / expected.norm() < 1e-2
        ours = torch.autograd.grad(found, given, upstream.bfloat16())
        theirs = torch.autograd.grad(expected, exact, upstream)
        for a, b in zip(ours, theirs):
            assert (a.float() - b).norm() / b.norm() < 2e-2


def test_float32_takes_the_exact_path():
    for segments in LAYOUTS:
        given = tensors(segments, 4, 2, 32, torch.float32)
        found = packed_attention(*given, segments, AttentionVariant(0.2))
        torch.testing.assert_close(
            found, masked_attention(*given, segments, AttentionVariant(0.2)), atol=2e-5, rtol=1e-4
        )


def test_an_engine_with_shared_prompts_gives_the_gradient_of_padded_rows():
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    for family, dtype in itertools.product(("qwen2", "qwen3", "gemma2", "qwen3_moe"), ("float32", "bfloat16")):
        if (family, dtype) == ("qwen3_moe", "bfloat16"):
            continue  # rounding changes which experts a token goes to
        with tempfile.TemporaryDirectory() as folder:
            path = model_dir(Path(folder), family, hidden=64, **(moe if family == "qwen3_moe" else {}))
            batch, found = grouped_batch(), []
            for passes in (PassSettings(packed=False), PassSettings(share_prompts=True)):
                engine = make_engine(path, engine={"dtype": dtype}, device="cuda", passes=passes)
                assert engine.forward.passes == passes, family
                found.append(gradients(engine, batch, PPOPolicyLoss(ActorConfig(entropy_coeff=0.01))))
        (loss, gradient), (again, other) = found
        tolerance = 1e-4 if dtype == "float32" else 5e-2
        assert math.isclose(again, loss, rel_tol=10 * tolerance, abs_tol=10 * tolerance), family
        assert relative_error(other, gradient) < tolerance, family
