"""Weights in 8 bits: codes and scales by hand, the bits of a model with the rounded weights, what is found wrong."""

from __future__ import annotations

import asyncio

import pytest
import torch
from torch import nn

from tests.harness.samplers import largest_difference, prompt, requests, sample, tiny_model
from tests.rollout.hf.test_weights import push
from verl.errors import ModelError, RolloutError
from verl.models import export_weights
from verl.models.router_replay import ExpertRecorder
from verl.rollout.hf.quantized import FORMATS, QuantizedLinear, quantized_layers
from verl.rollout.hf.sampler import HFSampler

WANTED = requests([prompt(5, 1), prompt(28, 2)], samples=4, max_tokens=12, ignore_eos=True)
KINDS = sorted(FORMATS)


def layer(weight: torch.Tensor, kind: str) -> QuantizedLinear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight = nn.Parameter(weight)
    return QuantizedLinear(linear, kind)


def test_int8_has_a_scale_for_each_row_and_rounds_to_the_nearest_of_255_levels():
    made = layer(torch.tensor([[1.27, -0.314, 0.0], [0.0, 0.0, 0.0], [-254.0, 3.1, 1.0]]), "int8")
    assert made.codes.tolist() == [[127, -31, 0], [0, 0, 0], [-127, 2, 0]] and made.codes.dtype == torch.int8
    assert made.scales.flatten().tolist() == pytest.approx([0.01, 1.0, 2.0])
    assert made.weight.tolist()[2] == [-254.0, 4.0, 0.0]


def test_fp8_has_a_scale_for_each_block_and_every_code_is_restored_as_torch_reads_it():
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().nan_to_num_(nan=0.0)
    weight = torch.zeros(130, 256)
    weight[0], weight[129, 200] = every, 4.48  # rows above 128 and columns above 128 have scales of their own
    made = layer(weight, "fp8")
    assert made.scales.shape == (2, 2) and made.scales.tolist()[1] == pytest.approx([1.0, 0.01])
    assert made.scales[0].tolist() == [1.0, 1.0], "the largest of e4m3 is 448"
    assert torch.equal(made.weight[0], every) and made.weight[129, 200].item() == pytest.approx(4.48)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(129, 257), (16, 16)])
def test_no_number_is_further_from_its_weight_than_half_a_step(kind, shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * torch.logspace(-9, 2, shape[0])[:, None]
    made = layer(weight, kind)
    made.check("w", weight)
    error = (made.weight - weight).norm() / weight.norm()
    assert error < {"int8": 0.01, "fp8": 0.04}[kind]
    assert made.codes.nbytes + made.scales.nbytes < weight.nbytes / 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("family", ["qwen2-tied", "gemma2"])
def test_tokens_and_log_probs_are_bitwise_those_of_a_model_with_the_rounded_weights(family, kind, exact):
    """`gemma2` goes through the modules of transformers, the other through written-out layers."""
    new = tiny_model(family, seed=1, scale=2.0)
    sampler = HFSampler(tiny_model(family, scale=2.0), owns_model=True, quantization=kind, full_determinism=exact)
    push(sampler, new, 1)
    found = sample(sampler, WANTED)
    in_full = largest_difference(new, WANTED, found)
    with torch.no_grad():
        for name, quantized in quantized_layers(sampler.model):
            new.get_parameter(name).copy_(quantized.weight)
    plain = HFSampler(new, owns_model=True, full_determinism=exact)
    expected = sample(plain, WANTED)
    assert [(d.token_ids, d.log_probs) for d in found] == [(d.token_ids, d.log_probs) for d in expected]
    assert in_full > 1e-3, "it does round"
    assert sampler.stats()["weight_bytes"] < plain.stats()["weight_bytes"]


def test_a_mixture_is_rounded_but_for_its_experts_and_routers():
    kind = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    old, new = (tiny_model("qwen3_moe", seed=s, scale=1.0, **kind) for s in (0, 1))
    sampler = HFSampler(old, owns_model=True, quantization="int8")
    push(sampler, new, 1)
    names = [name.rpartition(".self_attn.")[2] for name, _ in quantized_layers(sampler.model)]
    assert set(names) == {f"{part}_proj.weight" for part in "qkvo"}
    assert ExpertRecorder(sampler.model) and largest_difference(new, WANTED, sample(sampler, WANTED)) < 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_scale_and_a_layer_that_kept_its_weights_are_found_where_the_weight_arrives(kind, monkeypatch):
    old, new = tiny_model(seed=0), tiny_model(seed=1)
    sampler = HFSampler(old, owns_model=True, quantization=kind)
    name, damaged = list(quantized_layers(sampler.model))[3]
    weight = dict(export_weights(new))[name].float()
    with pytest.raises(RolloutError, match=rf"{name}: the sampler's {kind} weight is not the one that arrived"):
        damaged.check(name, weight)  # it has the old one
    damaged.take(name, weight)
    damaged.scales.mul_(1.25)
    with pytest.raises(RolloutError, match=rf"{name}: the sampler's {kind} weight is not the one that arrived"):
        damaged.check(name, weight)
    bad = tiny_model(seed=1)
    with torch.no_grad():
        bad.get_parameter(name)[0, 0] = torch.nan
    with pytest.raises(RolloutError, match=rf"{name}: .*finite"):
        push(sampler, bad, 1)
    with pytest.raises(RolloutError):
        sample(sampler, WANTED[:1])
    push(sampler, new, 2)
    sample(sampler, WANTED[:1])


def test_sleep_frees_the_rounded_weights_and_the_next_sync_brings_them_back():
    sampler, new = HFSampler(tiny_model(), owns_model=True, quantization="fp8"), tiny_model(seed=1)
    push(sampler, new, 1)
    before = sample(sampler, WANTED)
    asyncio.run(sampler.sleep(2))
    assert all(layer.codes.untyped_storage().nbytes() == 0 for _, layer in quantized_layers(sampler.model))
    asyncio.run(sampler.wake())
    push(sampler, new, 2)
    assert [d.log_probs for d in sample(sampler, WANTED)] == [d.log_probs for d in before]


def test_a_model_without_linear_layers_is_refused():
    with pytest.raises(ModelError, match="has no linear layer whose weights could be kept in int8"):
        HFSampler(tiny_model("gpt2"), owns_model=True, quantization="int8")
