"""Packed micro-batches and shared prompts: the same numbers as padded rows, from fewer tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.harness.engines import (
    FAMILIES,
    gradients,
    grouped_batch,
    make_engine,
    model_dir,
    policy_loss,
    relative_error,
)
from verl.algorithms.losses import PPOValueLoss
from verl.config import CriticConfig
from verl.engines.packing import computed_tokens, families, pack_rows, plan_packed
from verl.engines.rows import AlignedRows
from verl.engines.settings import PassSettings
from verl.errors import ConfigError
from verl.metrics import notices, reset_notices
from verl.protocol import DataProto

SHARED = PassSettings(packed=True, share_prompts=True)
PADDED = PassSettings(packed=False)


MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SIZES = {"qwen3_moe": MOE}


@pytest.mark.parametrize("passes", [PassSettings(), SHARED], ids=["packed", "shared"])
@pytest.mark.parametrize("family", [*FAMILIES, "mistral", "qwen3_moe"])
def test_log_probs_loss_and_gradient_are_those_of_padded_rows(tmp_path, family, passes):
    path = model_dir(tmp_path, family, **SIZES.get(family, {}))
    batch = grouped_batch()
    padded, ours = make_engine(path, passes=PADDED), make_engine(path, passes=passes)
    assert ours.forward.passes == passes and padded.forward.passes == PADDED
    outputs = ("log_probs", "entropy")
    expected, found = (engine.infer(batch, outputs) for engine in (padded, ours))
    for name in outputs:
        assert relative_error(found[name], expected[name]) < 1e-5
    expected_loss, expected_gradient = gradients(padded, batch, policy_loss(entropy_coeff=0.01), micro_batch_size=5)
    loss, gradient = gradients(ours, batch, policy_loss(entropy_coeff=0.01), max_tokens=70)
    assert loss == pytest.approx(expected_loss, rel=1e-5, abs=1e-7)
    assert relative_error(gradient, expected_gradient) < 1e-5


@pytest.mark.parametrize("passes", [PassSettings(), SHARED], ids=["packed", "shared"])
def test_values_and_their_gradient_are_those_of_padded_rows(qwen2, passes):
    batch, loss = grouped_batch(), PPOValueLoss(CriticConfig())
    found = []
    for setting in (PADDED, passes):
        engine = make_engine(qwen2, kind="value", passes=setting)
        torch.nn.init.normal_(engine.model.score.weight, generator=torch.Generator().manual_seed(0))
        found.append((engine.infer(batch, ("values",))["values"], *gradients(engine, batch, loss)))
    torch.testing.assert_close(found[1][0], found[0][0], atol=1e-5, rtol=1e-5)
    assert relative_error(found[1][2], found[0][2]) < 1e-5


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 20),
    limit=st.sampled_from([{}, {"micro_batch_size": 3}, {"max_tokens": 40}]),
    prompts=st.integers(1, 5),
)
def test_the_gradient_of_shared_prompts_does_not_depend_on_the_cut(engines, seed, limit, prompts):
    plain, shared = engines
    batch = grouped_batch(prompts=prompts, samples=3, seed=seed)
    loss, gradient = gradients(plain, batch, policy_loss(entropy_coeff=0.01))
    again, found = gradients(shared, batch, policy_loss(entropy_coeff=0.01), **limit)
    assert again == pytest.approx(loss, rel=1e-5, abs=1e-7) and relative_error(found, gradient) < 1e-5


@pytest.fixture(scope="module")
def engines(qwen2):
    return make_engine(qwen2, passes=PADDED), make_engine(qwen2, passes=SHARED)


def counted(engine, work) -> int:
    """Tokens that go through the first MLP."""
    tokens: list[int] = []
    handle = engine.model.model.layers[0].mlp.register_forward_hook(
        lambda m, i, out: tokens.append(out[..., 0].numel())
    )
    try:
        work()
    finally:
        handle.remove()
    return sum(tokens)


def test_only_real_tokens_are_computed_and_a_shared_prompt_once(qwen2):
    """3 prompts of 9 tokens, 4 responses of 12 each, of which the last token is read by nobody."""
    batch = full_batch()
    packed, shared = make_engine(qwen2), make_engine(qwen2, passes=SHARED)
    assert counted(packed, lambda: packed.infer(batch)) == 12 * (9 + 11)
    assert counted(shared, lambda: shared.infer(batch)) == 3 * 9 + 12 * 11
    assert counted(shared, lambda: shared.train_batch(batch, policy_loss(entropy_coeff=0.01))) == 3 * 9 + 12 * 11


def full_batch() -> DataProto:
    batch = grouped_batch(prompts=3, samples=4, prompt=9, response=12)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 200, (12, 21), generator=generator)
    ids[:, :9] = ids[torch.arange(12) % 3, :9]
    ones = torch.ones(12, 12)
    filled = dict.fromkeys(("advantages", "old_log_probs", "returns", "values"), ones * 0.1)
    return DataProto.from_dict(
        tensors={
            **batch.batch,
            **filled,
            "input_ids": ids,
            "prompts": ids[:, :9],
            "responses": ids[:, 9:],
            "attention_mask": torch.ones(12, 21, dtype=torch.long),
            "position_ids": torch.arange(21).expand(12, 21),
            "response_mask": ones.long(),
        }
    )


def test_gradient_checkpointing_computes_packed_rows_again(qwen2):
    batch = grouped_batch()
    _, expected = gradients(make_engine(qwen2, passes=PADDED), batch, policy_loss(entropy_coeff=0.01))
    engine = make_engine(qwen2, passes=SHARED, model={"enable_gradient_checkpointing": True})
    _, found = gradients(engine, batch, policy_loss(entropy_coeff=0.01))
    assert relative_error(found, expected) < 1e-5


def test_bf16_packs_too(qwen2):
    batch = grouped_batch()
    padded, shared = (make_engine(qwen2, engine={"dtype": "bfloat16"}, passes=p) for p in (PADDED, SHARED))
    assert shared.forward.passes == SHARED
    expected, found = (engine.infer(batch)["log_probs"] for engine in (padded, shared))
    assert relative_error(found, expected) < 1e-2


@given(
    lengths=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 8)), min_size=1, max_size=12),
    budget=st.integers(14, 60),
    rows=st.one_of(st.none(), st.integers(1, 5)),
    share=st.booleans(),
)
def test_a_plan_holds_every_row_once_and_obeys_its_limit(lengths, budget, rows, share):
    aligned = aligned_rows(lengths)
    limits = {"micro_batch_size": rows} if rows else {"max_tokens": budget}
    plan = plan_packed(aligned, **limits, share=share)
    assert sorted(row for part in plan for row in part) == list(range(len(lengths)))
    for part in plan:
        tokens = pack_rows(aligned, part, "cpu", share).input_ids.numel()
        assert tokens == computed_tokens(aligned, [part], share)
        assert len(part) <= rows if rows else tokens <= budget


def aligned_rows(lengths: list[tuple[int, int]]) -> AlignedRows:
    """Rows of (prompt, response) tokens; a prompt of n tokens is the same in all of them."""
    count, longest = len(lengths), max(p + r for p, r in lengths)
    tokens = torch.arange(longest).expand(count, longest).clone()
    responses = max(r for _, r in lengths)
    mask = torch.arange(responses) < torch.tensor([r for _, r in lengths])[:, None]
    before = torch.tensor([p for p, _ in lengths])[:, None] - 1 + torch.arange(responses)
    for row, (prompt, _) in enumerate(lengths):
        tokens[row, :prompt] = prompt
    needed = [p + r - 1 for p, r in lengths]
    return AlignedRows(tokens, before, mask.long(), mask, needed, [p for p, _ in lengths])


def test_families_are_read_off_the_tokens_and_not_off_names():
    rows = aligned_rows([(3, 2), (4, 2), (3, 5), (2, 1)])
    found = families(rows, range(4), share=True)
    assert [(f.rows, f.shared) for f in found] == [([0, 2], 3), ([1], 0), ([3], 0)]


def test_a_row_beyond_the_budget_is_an_error():
    with pytest.raises(ConfigError, match=r"max_token_len_per_gpu"):
        plan_packed(aligned_rows([(3, 9)]), max_tokens=10)


def test_micro_batches_under_a_budget_have_about_equal_work():
    generator = np.random.default_rng(0)
    rows = aligned_rows([(5, int(n)) for n in generator.integers(1, 100, 64)])
    tokens = [sum(rows.lengths[row] for row in part) for part in plan_packed(rows, max_tokens=512)]
    assert max(tokens) - min(tokens) <= 8


def test_a_model_that_cannot_be_packed_trains_on_padded_rows_and_says_so(qwen2, monkeypatch):
    from verl.models import attention

    monkeypatch.setattr(attention, "enable", lambda model, device: False)
    reset_notices()
    engine = make_engine(qwen2, passes=SHARED)
    assert engine.forward.passes == PADDED
    assert any("cannot be packed" in text for text in notices().values())
    torch.testing.assert_close(
        engine.infer(grouped_batch())["log_probs"],
        make_engine(qwen2, passes=PADDED).infer(grouped_batch())["log_probs"],
    )


def test_the_switch_in_the_configuration_decides(qwen2):
    on, off = (make_engine(qwen2, model={"use_remove_padding": value}) for value in (True, False))
    assert on.forward.passes.packed and not off.forward.passes.packed
    batch = full_batch()
    batch.batch["attention_mask"][0, 12:] = 0
    batch.batch["response_mask"][0, 3:] = 0
    padding = 9  # row 0 needs 11 of the 20 tokens of the others
    assert counted(off, lambda: off.infer(batch, micro_batch_size=12)) == 12 * 20
    assert counted(on, lambda: on.infer(batch, micro_batch_size=12)) == 12 * 20 - padding
