"""Packed attention against one dense masked softmax over the whole row, written out here."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from tests.harness.models import tiny_model_dir
from verl.models import attention
from verl.models.attention import ATTENTION_NAME, NO_PREFIX, AttentionVariant, PackedPlan, Segments, varlen
from verl.models.attention.flash_cpu import FlashOnCPU
from verl.models.attention.interface import packed_attention
from verl.models.attention.masked import masked_attention


def dense(query, key, value, segments: Segments, how: AttentionVariant):
    """Every pair of tokens is scored; what a token may not see is set to -inf."""
    owner = torch.repeat_interleave(torch.arange(len(segments.lengths)), torch.tensor(segments.lengths))
    before = torch.tensor(segments.prefix)[owner]
    position = segments.position_ids[0]
    same, prefix = owner[:, None] == owner, before[:, None] == owner
    visible = (same & (position[:, None] >= position)) | prefix
    if how.window is not None:
        visible &= position > position[:, None] - how.window
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = torch.einsum("ihd,jhd->hij", query, key) * how.scaling
    if how.softcap is not None:
        scores = torch.tanh(scores / how.softcap) * how.softcap
    return torch.einsum("hij,jhd->ihd", scores.masked_fill(~visible, -torch.inf).softmax(-1), value)


@st.composite
def packed(draw):
    """Prompts, the responses that follow them side by side, and sequences on their own."""
    prompts = draw(st.lists(st.integers(1, 40), max_size=3))
    lengths, prefix = list(prompts), [NO_PREFIX] * len(prompts)
    for number in range(len(prompts)):
        for length in draw(st.lists(st.integers(1, 50), min_size=1, max_size=4)):
            lengths.append(length)
            prefix.append(number)
    alone = draw(st.lists(st.integers(1, 60), min_size=0 if prompts else 1, max_size=4))
    return Segments(tuple(lengths + alone), tuple(prefix + [NO_PREFIX] * len(alone)))


def inputs(segments: Segments, heads: int = 4, kv_heads: int = 2, dim: int = 8, seed: int = 0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    tokens = segments.num_tokens
    sizes = ((tokens, heads, dim), (tokens, kv_heads, dim), (tokens, kv_heads, dim))
    return tuple(torch.randn(size, generator=generator, dtype=dtype).requires_grad_() for size in sizes)


@settings(max_examples=40, deadline=None)
@given(segments=packed())
def test_the_flash_path_is_dense_attention_and_so_is_its_gradient(segments):
    tensors = inputs(segments)
    upstream = torch.randn(tensors[0].shape, generator=torch.Generator().manual_seed(1))
    how = AttentionVariant(0.35)
    found, expected = FlashOnCPU.apply(*tensors, segments, how.scaling), dense(*tensors, segments, how)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)
    ours = torch.autograd.grad(found, tensors, upstream)
    theirs = torch.autograd.grad(expected, tensors, upstream)
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


@settings(max_examples=20, deadline=None)
@given(segments=packed())
def test_the_gradient_in_bf16_is_that_of_float32_up_to_bf16_rounding(segments):
    """Of the same numbers, which bf16 holds exactly; the output is rounded, and each gradient."""
    low, how = inputs(segments, dtype=torch.bfloat16), AttentionVariant(0.35)
    high = [tensor.detach().float().requires_grad_() for tensor in low]
    output, expected = FlashOnCPU.apply(*low, segments, how.scaling), dense(*high, segments, how)
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    ours = torch.autograd.grad(output, low, upstream)
    theirs = torch.autograd.grad(expected, high, upstream.float())
    for one, other in zip(ours, theirs):
        assert one.dtype == torch.bfloat16
        torch.testing.assert_close(one.float(), other, atol=2e-2, rtol=1e-2)


@settings(max_examples=30, deadline=None)
@given(segments=packed(), window=st.sampled_from([None, 1, 5, 30]), softcap=st.sampled_from([None, 2.0]))
def test_windows_and_soft_capping_are_dense_attention_too(segments, window, softcap):
    tensors, how = inputs(segments, seed=2), AttentionVariant(0.4, window, softcap)
    for path in (masked_attention, packed_attention):
        torch.testing.assert_close(path(*tensors, segments, how), dense(*tensors, segments, how), atol=2e-6, rtol=1e-5)


def test_values_narrower_than_queries_come_out_as_narrow():
    segments = Segments((5, 3, 4), (NO_PREFIX, 0, 0))
    query, key, value = inputs(segments)
    narrow = value[..., :6]
    found = packed_attention(query, key, narrow, segments, AttentionVariant(0.5))
    assert found.shape == (12, 4, 6)
    torch.testing.assert_close(found, dense(query, key, narrow, segments, AttentionVariant(0.5)), atol=2e-6, rtol=1e-5)


def test_equal_lengths_need_no_gather_and_unequal_ones_little_padding():
    even = Segments.separate((40, 40, 40))
    assert len(even.grids) == 1 and even.grids[0]._index is None
    uneven = Segments.separate((400, 390, 100, 90))
    assert [(grid.rows, grid.columns) for grid in uneven.grids] == [(2, 400), (2, 100)]


@pytest.mark.parametrize("length", [24, 31, 32, 47])  # a remainder without lanes, one that is filled up, none
def test_prompts_and_responses_of_one_length_each_need_no_gather_and_are_dense_attention(length):
    segments = Segments((10, 10, *(length,) * 6), (NO_PREFIX, NO_PREFIX, 0, 0, 0, 1, 1, 1))
    assert [(grid.rows, grid.columns, grid._index) for grid in segments.grids] == [(6, length, None), (2, 10, None)]
    tensors, how = inputs(segments, dtype=torch.float64), AttentionVariant(0.35)
    found, expected = FlashOnCPU.apply(*tensors, segments, how.scaling), dense(*tensors, segments, how)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
    upstream = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ours, theirs = (torch.autograd.grad(out, tensors, upstream) for out in (found, expected))
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-10)


def test_positions_restart_in_every_sequence_and_go_on_behind_a_prompt():
    assert Segments((3, 2, 1, 2), (NO_PREFIX, 0, 0, NO_PREFIX)).position_ids.tolist() == [[0, 1, 2, 3, 4, 3, 0, 1]]


@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
def test_a_model_with_it_still_obeys_a_mask(tmp_path, family):
    path = tiny_model_dir(tmp_path / family, family)
    plain, ours = (AutoModelForCausalLM.from_pretrained(path).eval() for _ in range(2))
    assert attention.enable(ours, "cpu") and ours.config._attn_implementation == ATTENTION_NAME
    ids = torch.randint(3, 200, (2, 6))
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]])
    with torch.no_grad():
        expected, found = (model(input_ids=ids, attention_mask=mask).logits for model in (plain, ours))
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], atol=1e-5, rtol=1e-5)


def test_a_model_that_looks_sideways_keeps_its_own_attention(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir(tmp_path / "qwen2"))
    before = model.config._attn_implementation

    def mix(module, args, output):
        return output + output.roll(1, dims=1)  # every token sees the one before it in the row

    handle = model.model.layers[0].mlp.register_forward_hook(mix)
    assert not attention.enable(model, "cpu") and model.config._attn_implementation == before
    handle.remove()
    assert attention.enable(model, "cpu")


def test_a_chosen_attention_stays(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir(tmp_path / "qwen2"), attn_implementation="eager")
    model.set_attn_implementation("flex_attention")
    assert not attention.enable(model, "cpu") and model.config._attn_implementation == "flex_attention"


@pytest.mark.parametrize("version", [2, 3])
def test_an_installed_flash_attention_is_called_with_where_sequences_end(monkeypatch, version):
    calls = []

    def flash_attn_varlen_func(q, k, v, **options):
        calls.append(options)
        return (q, None) if version == 3 else q

    name = varlen.PACKAGES[version]
    module = types.ModuleType(name)
    module.__spec__ = types.SimpleNamespace()
    module.flash_attn_varlen_func = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, name, module)
    varlen.package.cache_clear()
    try:
        segments = Segments.separate((3, 5))
        query, key, value = inputs(segments)
        out = varlen.package_attention(query, key, value, segments, AttentionVariant(0.5, window=4, softcap=3.0))
    finally:
        varlen.package.cache_clear()
    (options,) = calls
    assert torch.equal(out, query)
    assert options["cu_seqlens_q"].tolist() == [0, 3, 8] and options["cu_seqlens_q"].dtype == torch.int32
    assert options["max_seqlen_k"] == 5 and options["causal"] and options["softmax_scale"] == 0.5
    assert options["window_size"] == (3, 0) and options["softcap"] == 3.0 and ("dropout_p" in options) == (version == 2)


def test_the_kernel_for_cuda_gets_prompts_and_followers_as_whole_ranges():
    segments = Segments((4, 2, 3, 1, 5, 6), (NO_PREFIX, NO_PREFIX, 0, 0, 1, NO_PREFIX))
    own, to_prefix = varlen.calls(segments)
    assert own.q_ends.tolist() == [0, 4, 6, 9, 10, 15, 21] and own.longest == (6, 6)
    assert (to_prefix.q, to_prefix.k) == (slice(6, 15), slice(0, 6)) and not to_prefix.causal
    assert to_prefix.q_ends.tolist() == [0, 4, 9] and to_prefix.k_ends.tolist() == [0, 4, 6]


def test_a_plan_is_what_a_model_is_called_with(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir(tmp_path / "qwen3", "qwen3")).eval()
    assert attention.enable(model, "cpu")
    rows = [torch.randint(3, 200, (1, n)) for n in (4, 9)]
    segments = Segments.separate((4, 9))
    with torch.no_grad():
        found = model(
            input_ids=torch.cat(rows, 1),
            attention_mask=None,
            position_ids=segments.position_ids,
            use_cache=False,
            attention_plan=PackedPlan(segments),
        ).logits[0]
        expected = torch.cat([model(input_ids=row, use_cache=False).logits[0] for row in rows])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_a_chosen_flash_attention_is_taken_over_where_rows_are_packed(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir(tmp_path / "qwen2"))
    model.config._attn_implementation = "flash_attention_2"
    assert attention.enable(model, "cpu") and model.config._attn_implementation == ATTENTION_NAME
