"""Weights in 8 and 4 bits on CUDA: what a layer restores, and whether recorded graphs see the weights of an update."""

from __future__ import annotations

import asyncio
import copy
import itertools

import torch

from tests.gpu.test_hf_sampler import WANTED, difference, model_of, sampler_of
from tests.harness.samplers import sample
from verl.models import export_weights
from verl.models.nf4 import NF4Linear
from verl.rollout.hf.quantized import FORMATS, QuantizedLinear, quantized_layers
from verl.weight_sync import chunk_weights


def layers(make, width: int = 200):
    """The same linear layer on both devices."""
    torch.manual_seed(0)
    weight = torch.randn(300, width) * torch.logspace(-6, 2, 300)[:, None]
    for device in ("cpu", "cuda"):
        linear = torch.nn.Linear(width, 300, bias=False)
        linear.weight = torch.nn.Parameter(weight.to(device))
        yield make(linear)


def test_eight_bits_are_those_of_the_cpu() -> None:
    for kind in FORMATS:
        here, there = layers(lambda linear, kind=kind: QuantizedLinear(linear, kind))
        torch.testing.assert_close(there.scales.cpu(), here.scales, rtol=1e-6, atol=0)
        apart = (there.codes.cpu().float() - here.codes.float()).ne(0).float().mean()
        assert apart < 1e-3, (kind, "the last bit of a scale may round a number the other way", apart)
        again = copy.deepcopy(here).cuda()
        assert torch.equal(again.weight.cpu(), here.weight), kind


def test_four_bits_are_those_of_the_cpu() -> None:
    for width in (192, 200):
        here, there = layers(lambda linear: NF4Linear(linear.weight, linear.bias), width)
        torch.testing.assert_close(there.restored().cpu(), here.restored(), rtol=1e-6, atol=0)


def test_a_rounded_sampler_is_one_with_the_rounded_weights_also_after_an_update() -> None:
    """A recorded graph reads the codes and scales, where the update wrote them."""
    for kind, dtype in itertools.product(FORMATS, (torch.float32, torch.bfloat16)):
        old, new = model_of("qwen3", dtype, scale=1.0), model_of("qwen3", dtype, scale=1.2)
        sampler = sampler_of(old, quantization=kind)
        sample(sampler, WANTED)
        asyncio.run(sampler.update_weights(chunk_weights(export_weights(new), 4000, 1), 1))
        drawn = sample(sampler, WANTED)
        in_full = difference(new, WANTED, drawn)
        with torch.no_grad():
            for name, layer in quantized_layers(sampler.model):
                new.get_parameter(name).copy_(layer.weight)
        exact = dtype == torch.float32
        assert difference(new, WANTED, drawn) < (1e-4 if exact else 0.06), (kind, dtype)
        if exact:
            plain = sample(sampler_of(new), WANTED)
            assert [done.token_ids for done in drawn] == [done.token_ids for done in plain], kind
            assert in_full > 1e-3, "it does round"
