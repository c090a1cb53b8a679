from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tests.harness.engines import make_engine, ragged_batch, relative_error
from verl.algorithms.losses import PPOPolicyLoss, SFTLoss
from verl.checkpoint.part import read_part, write_part
from verl.config import ActorConfig
from verl.engines.adapters import AdapterBaseEngine
from verl.errors import CheckpointError, ModelError
from verl.metrics import notices, reset_notices
from verl.models import load_causal_lm, merging, nf4
from verl.models.weights import count_parameters, export_weights

QLORA = {"lora_rank": 4, "lora_alpha": 8, "lora_base_quantization": "nf4"}


def trained(qwen2, steps: int = 3, **arguments):
    engine = make_engine(qwen2, model=QLORA, **arguments)
    for seed in range(steps):
        engine.train_batch(ragged_batch(seed=seed), SFTLoss())
    return engine


def levels() -> list[float]:
    """The paper's: 8 quantiles of N(0, 1) below zero, zero, and 7 above, divided by the largest; offset 0.9677083."""
    normal = torch.distributions.Normal(0.0, 1.0)
    above = normal.icdf(torch.linspace(0.9677083, 0.5, 9)[:-1].double())
    below = -normal.icdf(torch.linspace(0.9677083, 0.5, 8)[:-1].double())
    values = torch.cat([above, below, torch.zeros(1)]).sort().values
    return (values / values.abs().max()).tolist()


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """Written out: of each block of 64 numbers the nearest levels, times the block's largest magnitude."""
    table = torch.tensor(levels())
    flat = weight.flatten()
    blocks = []
    for block in flat.split(64):
        largest = block.abs().max()
        nearest = (block[:, None] / largest - table).abs().argmin(1)
        blocks.append(table[nearest] * largest)
    return torch.cat(blocks).view(weight.shape)


@pytest.mark.parametrize("shape", [(16, 64), (7, 30)])
def test_a_weight_is_rounded_to_the_quantiles_of_the_paper(shape):
    torch.manual_seed(0)
    weight = torch.randn(shape) * 0.02
    torch.testing.assert_close(nf4.NF4Linear(weight).restored(), rounded(weight), atol=1e-7, rtol=1e-5)


def test_rounding_what_is_rounded_changes_no_bit():
    torch.manual_seed(0)
    once = nf4.NF4Linear(torch.randn(48, 64)).restored()
    assert torch.equal(nf4.NF4Linear(once).restored(), once)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_and_its_gradient_are_those_of_a_linear_layer_with_the_rounded_weight(dtype):
    torch.manual_seed(0)
    bias = nn.Parameter(torch.randn(48), requires_grad=False)
    layer = nf4.NF4Linear(torch.randn(48, 64), bias)
    x, other = (torch.linspace(-1, 1, 128, dtype=dtype).view(2, 64).requires_grad_() for _ in range(2))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        ours, expected = layer(x), nn.functional.linear(other, layer.restored(), bias)
    ours.float().square().sum().backward()
    expected.float().square().sum().backward()
    assert torch.equal(ours, expected) and ours.dtype == dtype
    torch.testing.assert_close(x.grad, other.grad)


def test_a_base_takes_four_and_a_half_bits_a_weight_and_the_head_stays(qwen2):
    engine = make_engine(qwen2, model=QLORA)
    layers = dict(nf4.nf4_layers(engine.model))
    assert len(layers) == 2 * 7 and not any("lm_head" in name or "lora_" in name for name in layers)
    for layer in layers.values():
        numbers = layer.in_features * layer.out_features
        assert layer.packed.nbytes == numbers / 2 and layer.largest.nbytes == 4 * math.ceil(numbers / 64)
    plain = make_engine(qwen2, model={"lora_rank": 4})
    assert engine.num_parameters == plain.num_parameters


def test_weights_are_rounded_alike_whether_read_one_by_one_or_loaded_as_a_whole(qwen2, tmp_path):
    model = load_causal_lm(str(qwen2))
    nf4.quantize_frozen(model)
    expected = dict(export_weights(model))
    original = dict(export_weights(load_causal_lm(str(qwen2))))
    reset_notices()
    engine = make_engine(qwen2, model=QLORA)
    assert not any("as a whole" in text for text in map(str, notices()))
    found = dict(engine.export_weights())
    assert found.keys() == expected.keys() == original.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    changed = {name for name in found if not torch.equal(found[name], original[name])}
    assert len(changed) == 14 and count_parameters(model) == sum(t.numel() for t in original.values())


def test_what_the_sampler_is_sent_is_the_policy_that_is_trained(qwen2, tmp_path):
    engine, batch = trained(qwen2), ragged_batch()
    expected = engine.infer(batch)["log_probs"]
    other = make_engine(qwen2, trains=False)
    other.load_weights(engine.export_weights())
    torch.testing.assert_close(other.infer(batch)["log_probs"], expected, atol=1e-5, rtol=1e-5)
    engine.save_hf(tmp_path / "whole")
    again = make_engine(tmp_path / "whole", trains=False)
    torch.testing.assert_close(again.infer(batch)["log_probs"], expected, atol=1e-5, rtol=1e-5)
    untrained, unrounded = make_engine(qwen2, model=QLORA), make_engine(qwen2)
    assert relative_error(untrained.infer(batch)["log_probs"], unrounded.infer(batch)["log_probs"]) > 1e-3


def test_only_the_adapter_is_trained_and_its_gradient_is_that_of_an_adapter_on_the_rounded_weights(qwen2, tmp_path):
    base = load_causal_lm(str(qwen2))
    nf4.quantize_frozen(base)
    other = make_engine(qwen2, trains=False)
    other.load_weights(export_weights(base))
    other.save_hf(tmp_path / "rounded")
    batch, loss = ragged_batch(), PPOPolicyLoss(ActorConfig())
    unrounded = {**QLORA, "lora_base_quantization": None}
    ours, plain = make_engine(qwen2, model=QLORA), make_engine(tmp_path / "rounded", model=unrounded)
    for _ in range(2):
        a, b = (one.train_batch(batch, loss).values() for one in (ours, plain))
        for name in ("loss", "grad_norm"):
            assert a[name] == pytest.approx(b[name], rel=1e-5)
    factors = dict(plain.export_adapter())
    assert all(torch.allclose(t, factors[name], atol=1e-6) for name, t in ours.export_adapter())


def test_the_reference_policy_is_the_rounded_base(qwen2):
    engine, batch = trained(qwen2), ragged_batch()
    alone = make_engine(qwen2, trains=False, model={"lora_base_quantization": "nf4"})
    assert torch.equal(AdapterBaseEngine(engine).infer(batch)["log_probs"], alone.infer(batch)["log_probs"])


def test_a_checkpoint_resumes_bitwise_says_what_its_base_is_and_merges_to_the_same_policy(qwen2, tmp_path):
    engine, batch = trained(qwen2), ragged_batch()
    write_part(tmp_path / "actor", engine.state(), hf=engine.hf_writer())
    other = make_engine(qwen2, model=QLORA, seed=9)
    other.load_state(read_part(tmp_path / "actor"))
    unrounded = make_engine(qwen2, model={**QLORA, "lora_base_quantization": None})
    with pytest.raises(CheckpointError, match=r"trained on a base in 4 bits.*Set it to nf4"):
        unrounded.load_state(read_part(tmp_path / "actor"))
    merging.merge(tmp_path / "actor", tmp_path / "merged")
    merged = make_engine(tmp_path / "merged", trains=False)
    torch.testing.assert_close(merged.infer(batch)["log_probs"], engine.infer(batch)["log_probs"], atol=1e-5, rtol=1e-5)
    for one in (engine, other):
        one.train_batch(ragged_batch(seed=7), SFTLoss())
    a, b = engine.state(), other.state()
    assert all(torch.equal(tensor, b.tensors[name]) for name, tensor in a.tensors.items())


def test_a_record_of_another_rounding_is_refused(tmp_path):
    (tmp_path / nf4.RECORD).write_text('{"lora_base_quantization": "fp4", "block_size": 64}')
    with pytest.raises(ModelError, match=r"unknown way"):
        nf4.recorded(tmp_path)
