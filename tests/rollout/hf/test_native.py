"""The written-out decoder against the modules of transformers: same numbers, new weights arrive, who qualifies."""

from __future__ import annotations

import asyncio
import copy

import pytest
import torch

from tests.harness.samplers import largest_difference, prompt, requests, sample, tiny_model
from verl.metrics import notices
from verl.models import export_weights
from verl.rollout.hf import projections
from verl.rollout.hf.native import NativeModel
from verl.rollout.hf.projections import (
    GRID,
    FusedProjections,
    PackedLinear,
    PackedProjections,
    TransposedLinear,
    can_pack,
)
from verl.rollout.hf.sampler import HFSampler
from verl.weight_sync import chunk_weights

WANTED = requests([prompt(n, n) for n in (1, 9, 26, 40)], samples=3, max_tokens=[4, 30, 13], temperature=0.7)
FAMILIES = ("qwen2", "qwen2-tied", "qwen3", "llama", "mistral")
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def native(sampler: HFSampler) -> NativeModel | None:
    return sampler._runner.native


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_equal_those_of_the_familys_own_modules(family):
    reference = tiny_model(family, scale=2.0)
    sampler = HFSampler(copy.deepcopy(reference), owns_model=True)
    assert native(sampler) is not None
    assert largest_difference(reference, WANTED, sample(sampler, WANTED)) < 2e-5


def test_fused_weights_are_views_through_which_new_ones_arrive(monkeypatch):
    monkeypatch.setattr("verl.rollout.hf.projections.MEMORY_SHARE", 1e-9)
    model, new = tiny_model(scale=2.0), tiny_model(seed=1, scale=2.0)
    size = sum(p.numel() for p in model.parameters())
    sampler = HFSampler(model, owns_model=True)
    projections = native(sampler).layers[0].projections
    assert isinstance(projections, FusedProjections)
    attention = model.model.layers[0].self_attn
    assert attention.k_proj.weight.untyped_storage().data_ptr() == attention.q_proj.weight.untyped_storage().data_ptr()
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    assert sum(storages.values()) == 4 * size, "nothing is held twice"
    asyncio.run(sampler.update_weights(chunk_weights(export_weights(new), 1000, 1), 1))
    assert largest_difference(new, WANTED, sample(sampler, WANTED)) < 2e-5


def test_packed_weights_follow_an_update_and_are_freed_by_sleep():
    old, new = tiny_model(scale=2.0), tiny_model(seed=1, scale=2.0)
    sampler = HFSampler(old, owns_model=True)
    assert isinstance(native(sampler).layers[0].projections, PackedProjections)
    before, packed = sample(sampler, WANTED), native(sampler).layers[0].projections._qkv
    asyncio.run(sampler.update_weights(chunk_weights(export_weights(new), 1000, 1), 1))
    assert native(sampler).layers[0].projections._qkv is packed, "the next pass packs, the update does not wait for it"
    after = sample(sampler, WANTED)
    assert largest_difference(new, WANTED, after) < 2e-5 < 0.1 < largest_difference(new, WANTED, before)
    asyncio.run(sampler.sleep(2))
    with pytest.raises(AttributeError):
        native(sampler).layers[0].projections.out(torch.zeros(1, 32))
    asyncio.run(sampler.wake())
    asyncio.run(sampler.update_weights(chunk_weights(export_weights(new), 1000, 2), 2))
    assert [c.token_ids for c in sample(sampler, WANTED)] == [c.token_ids for c in after]


@pytest.mark.parametrize("form", [PackedLinear, TransposedLinear])
@pytest.mark.parametrize("has_bias", [False, True])
def test_both_forms_of_a_weight_give_the_product_and_what_follows_it(form, has_bias):
    if not can_pack(torch.float32, 0):
        pytest.skip("this torch has no packed products")
    torch.manual_seed(0)
    x, weight, other = torch.randn(2 * GRID, 24), torch.randn(40, 24), torch.randn(2 * GRID, 40)
    bias = torch.randn(40) if has_bias else None
    exact = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    linear = form(weight, bias)
    assert torch.allclose(linear(x).double(), exact, atol=1e-5)
    assert torch.allclose(linear.silu(x).double(), exact / (1 + (-exact).exp()), atol=1e-5)
    assert torch.allclose(linear.joined(x, other, "add").double(), exact + other, atol=1e-5)
    assert torch.allclose(linear.joined(x, other, "mul").double(), exact * other, atol=1e-5)


@pytest.mark.parametrize("is_even", [False, True])
def test_blas_multiplies_small_weights_only_where_it_rounds_every_row_alike(is_even, monkeypatch):
    monkeypatch.setattr(projections, "_blas_is_even", lambda *shape: is_even)
    model = tiny_model(scale=2.0)
    sampler = HFSampler(copy.deepcopy(model), owns_model=True)
    assert isinstance(native(sampler).layers[0].projections._up, TransposedLinear if is_even else PackedLinear)
    assert [native(sampler).rows_for(n) for n in (1, 16, 17, 40)] == [16 if is_even else 1, 16, 32, 48]
    assert largest_difference(model, WANTED, sample(sampler, WANTED)) < 2e-5


def test_a_row_has_the_same_bits_in_every_product_that_blas_may_compute():
    shapes = [(64, 32), (128, 64), (320, 320), (960, 320)]
    for outer, inner in shapes:
        if not projections._blas_is_even(outer, inner):
            continue
        torch.manual_seed(outer)
        linear, x = TransposedLinear(torch.randn(outer, inner), None), torch.randn(20 * GRID, inner)
        alone = linear(x[-GRID:])
        for rows in range(2 * GRID, 20 * GRID, GRID):
            assert torch.equal(linear(x[-rows:])[-GRID:], alone)


@pytest.mark.parametrize(
    ("family", "config"),
    [("gemma2", {}), ("qwen2", {"hidden_act": "gelu"}), ("qwen2", {"rope_parameters": DYNAMIC})],
)
def test_what_is_not_written_out_runs_through_its_own_modules(family, config):
    model = tiny_model(family, scale=1.5, **config)
    sampler = HFSampler(model, owns_model=True)
    assert native(sampler) is None
    assert largest_difference(model, WANTED, sample(sampler, WANTED)) < 2e-5


def test_a_model_that_somebody_else_owns_is_left_to_its_modules():
    assert native(HFSampler(tiny_model())) is None
    assert native(HFSampler(tiny_model(), owns_model=True, full_determinism=True)) is None


def test_a_layer_with_an_adapter_in_it_runs_through_its_own_modules():
    from peft import LoraConfig, inject_adapter_in_model

    model = tiny_model(scale=2.0)
    plain = tiny_model(scale=2.0)
    adapted = inject_adapter_in_model(
        LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False), model
    )
    adapted.eval()
    sampler = HFSampler(adapted, owns_model=True)
    found = sample(sampler, WANTED)
    assert native(sampler) is None
    assert largest_difference(adapted, WANTED, found) < 2e-5 < largest_difference(plain, WANTED, found)


@pytest.mark.parametrize("rope", [{"rope_type": "linear", "factor": 2.0}, LLAMA3])
def test_scaled_rotary_embeddings_come_from_the_model(rope):
    model = tiny_model("llama", scale=2.0, rope_parameters={"rope_theta": 10000.0, **rope})
    sampler = HFSampler(copy.deepcopy(model), owns_model=True)
    assert native(sampler) is not None
    assert largest_difference(model, WANTED, sample(sampler, WANTED)) < 2e-5


def test_a_decoder_that_computes_something_else_here_is_not_used_and_a_notice_says_so(monkeypatch):
    monkeypatch.setattr("verl.rollout.hf.native.rotate", lambda x, cos, sin: x)
    model = tiny_model(scale=2.0)
    sampler = HFSampler(model, owns_model=True)
    assert native(sampler) is None
    assert "a trial failed: UnsupportedModelError" in notices()["PoolRunner, Qwen2ForCausalLM"]
    assert largest_difference(model, WANTED, sample(sampler, WANTED)) < 2e-5
