"""Rows without a gradient: not computed, and no number of a step changes for it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.harness.engines import (
    gradients,
    make_engine,
    model_dir,
    on_policy_batch,
    padded_logits,
    policy_loss,
    ragged_batch,
)
from verl.algorithms.losses import PPOPolicyLoss, SFTLoss, without_gradient
from verl.protocol import DataProto

ZERO = (0, 2, 5, 7)


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_dir(tmp_path_factory.mktemp("qwen2"))


def on_policy(constant: Iterable[int] = ZERO, **columns: Tensor) -> DataProto:
    """Eight rows; row 4 has no token to train on."""
    return on_policy_batch(8, constant, **columns)


def counted(engine: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows that go through the engine's model from now on."""
    rows: list[int] = []
    forward = type(engine.forward).__call__

    def counting(self: Any, micro: Any, *args: Any, **kwargs: Any) -> Any:
        if self is engine.forward:
            rows.extend(micro.index.tolist())
        return forward(self, micro, *args, **kwargs)

    monkeypatch.setattr(type(engine.forward), "__call__", counting)
    return rows


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
@pytest.mark.parametrize("limits", [{}, {"micro_batch_size": 2}, {"max_tokens": 24}])
def test_rows_of_advantage_0_are_left_out_and_no_number_changes(qwen2, monkeypatch, mode, limits):
    batch, loss_fn = on_policy(), policy_loss(loss_agg_mode=mode)
    every = make_engine(qwen2)
    every.skips_constant_rows = False
    expected_loss, expected = gradients(every, batch, loss_fn, **limits)
    engine = make_engine(qwen2)
    computed = counted(engine, monkeypatch)
    loss, gradient = gradients(engine, batch, loss_fn, **limits)
    assert len(computed) == 3, "rows 1, 3 and 6"
    assert loss == pytest.approx(expected_loss, abs=1e-7)
    torch.testing.assert_close(gradient, expected, atol=1e-7, rtol=1e-5)
    ours, theirs = engine.train_batch(batch, loss_fn, **limits).values(), every.train_batch(batch, loss_fn).values()
    tokens = batch.batch["attention_mask"].sum(-1)
    assert ours.pop("without_gradient") == pytest.approx(float(tokens[[0, 2, 4, 5, 7]].sum() / tokens.sum()))
    assert theirs.pop("without_gradient") == 0
    for name in ("padding_waste", "prompt_sharing"):
        ours.pop(name), theirs.pop(name)
    assert ours == pytest.approx(theirs, abs=1e-6, rel=1e-5)


def test_the_gradient_is_that_of_all_rows_by_autograd(qwen2):
    batch, engine = on_policy(), make_engine(qwen2)
    _, gradient = gradients(engine, batch, policy_loss(loss_agg_mode="token-mean"))
    mask, model = batch.batch["response_mask"].bool(), engine.model
    log_probs = padded_logits(model, batch).log_softmax(-1).gather(-1, batch.batch["responses"][..., None])[..., 0]
    loss = -(log_probs[mask] * batch.batch["advantages"][mask]).mean()
    parameters = [p for p in model.parameters() if p.requires_grad]
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])
    torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-4)


def test_a_mini_batch_of_advantage_0_moves_weights_as_zeros_do(qwen2):
    """AdamW has momentum and weight decay: a gradient of zeros is a step, no gradient is none.

    Its epsilon is large enough that rounding of the smallest gradients, which depends on the processor, stays small.
    """
    optim = {"weight_decay": 0.1, "override_optimizer_config": {"eps": 1e-4}}
    engines = [make_engine(qwen2, optim=optim) for _ in range(2)]
    engines[0].skips_constant_rows = False
    for engine in engines:
        engine.train_batch(on_policy(), policy_loss())
        before = [p.detach().clone() for p in engine.model.parameters()]
        metrics = engine.train_batch(on_policy(range(8)), policy_loss()).values()
        assert metrics["grad_norm"] == 0 and metrics["skipped_empty_step"] == 0
        assert any(not torch.equal(old, new) for old, new in zip(before, engine.model.parameters()))
    for ours, theirs in zip(*(engine.model.parameters() for engine in engines)):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)


def test_rows_without_a_label_are_left_out_of_sft(qwen2, monkeypatch):
    engine = make_engine(qwen2)
    computed = counted(engine, monkeypatch)
    metrics = engine.train_batch(ragged_batch(rows=6), SFTLoss()).values()
    assert len(computed) == 5
    assert metrics["without_gradient"] > 0


@pytest.mark.parametrize(
    "settings",
    [
        {"use_kl_loss": True},
        {"entropy_coeff": 0.1},
        {"calculate_entropy": True},
        {"policy_loss": {"loss_mode": "gspo"}},
    ],
)
def test_every_row_is_computed_where_a_term_or_a_metric_needs_it(settings):
    batch = on_policy(ref_log_prob=torch.zeros(8, 7))
    assert not any(without_gradient(policy_loss(**settings), batch.batch))


def test_a_right_answer_of_advantage_0_is_computed_where_its_likelihood_is_in_the_loss():
    weights = torch.zeros(8, 7)
    weights[[0, 1]] = 0.5
    batch = on_policy(positive_lm_weights=weights)
    assert without_gradient(policy_loss(positive_lm_coef=0.1), batch.batch) == [n in (2, 4, 5, 7) for n in range(8)]


def test_every_row_is_computed_off_policy_and_under_correction():
    assert not any(without_gradient(policy_loss(), on_policy(old_log_probs=torch.zeros(8, 7)).batch))
    corrected = on_policy(rollout_log_probs=torch.zeros(8, 7), rollout_is_weights=torch.ones(8, 7))
    assert not any(without_gradient(policy_loss(), corrected.batch))
    loss = PPOPolicyLoss(policy_loss().config, use_rollout_log_probs=True)
    assert not any(without_gradient(loss, on_policy(rollout_log_probs=torch.zeros(8, 7)).batch))


def test_a_row_whose_advantage_is_not_a_number_is_computed():
    batch = on_policy()
    batch.batch["advantages"][0] = float("nan")
    assert without_gradient(policy_loss(), batch.batch) == [n in (2, 4, 5, 7) for n in range(8)]
