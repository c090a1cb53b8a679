"""Norms in one step give the numbers of the families' own, and their gradients to rounding."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.engines.builders import make_engine, model_dir
from verl.models.norms import FusedNormForward, FusedRMSNorm, fuse_norms


def written_out(x, weight, eps):
    return weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


@pytest.mark.parametrize(("shape", "size"), [((1, 30, 64), 1.0), ((2, 3, 5, 16), 1e-4), ((7, 3), 30.0), ((0, 8), 1.0)])
def test_output_and_gradients_are_those_of_the_formula(shape, size):
    generator = torch.Generator().manual_seed(0)
    x, weight, upstream = (torch.randn(s, generator=generator) for s in (shape, shape[-1:], shape))
    tensors = [(x * size).requires_grad_(), weight.requires_grad_()]
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    found, expected = FusedRMSNorm.apply(*tensors, 1e-6), written_out(*exact, 1e-6)
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=1e-6)
    ours = torch.autograd.grad(found, tensors, upstream)
    theirs = torch.autograd.grad(expected, exact, upstream.double())
    for mine, one in zip(ours, theirs):
        scale = max(1e-6, float(one.abs().max())) if one.numel() else 1.0
        torch.testing.assert_close(mine.double() / scale, one / scale, atol=2e-6, rtol=0)


def test_the_closed_form_is_the_gradient():
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in ((3, 5), (5,)))
    assert torch.autograd.gradcheck(lambda *tensors: FusedRMSNorm.apply(*tensors, 1e-2), (x, weight))


@pytest.mark.parametrize(("family", "count"), [("qwen2", 5), ("qwen3", 9), ("gemma2", 0)])
def test_norms_are_taken_over_where_they_are_plain(tmp_path, family, count):
    """Two layers with two norms each and one at the end; Qwen3 norms queries and keys too, Gemma adds 1 to a weight."""
    config = AutoConfig.from_pretrained(model_dir(tmp_path, family))
    own = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in own.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)))
    ours, ids = copy.deepcopy(own), torch.arange(3, 13)[None]
    assert fuse_norms(ours) == count
    found, expected = (model(input_ids=ids).logits for model in (ours, own))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    slopes, exact = (torch.autograd.grad(z.sum(), [*m.parameters()]) for z, m in ((found, ours), (expected, own)))
    torch.testing.assert_close(slopes, exact, atol=1e-4, rtol=1e-4)


def test_a_copy_of_a_model_computes_with_its_own_weights(tmp_path):
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_dir(tmp_path, "qwen2")))
    fuse_norms(model)
    norm, x = copy.deepcopy(model).model.norm, torch.randn(2, 32)
    with torch.no_grad():
        norm.weight.zero_()
    assert not norm(x).any() and model.model.norm(x).any()


def test_half_precision_stays_with_the_family(tmp_path):
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_dir(tmp_path, "qwen2")))
    norm, x = model.model.norm, torch.randn(2, 3, 32).bfloat16()
    expected = norm(x)
    fuse_norms(model)
    assert isinstance(norm.forward, FusedNormForward) and torch.equal(norm(x), expected)


def test_an_engine_on_a_cpu_trains_with_them(tmp_path):
    engine = make_engine(model_dir(tmp_path, "qwen2"))
    assert isinstance(engine.model.model.norm.forward, FusedNormForward)
