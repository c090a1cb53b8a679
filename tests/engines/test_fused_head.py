"""`use_fused_kernels`: an engine's numbers with the fused LM head are those with the model's own."""

from __future__ import annotations

import pytest
import torch

from tests.harness.engines import FAMILIES, gradients, make_engine, model_dir, policy_loss, ragged_batch, relative_error
from verl.algorithms.losses import PPOPolicyLoss, SFTLoss
from verl.config import ActorConfig
from verl.engines.settings import PassSettings
from verl.errors import EngineError
from verl.models.fused_head import apply, one_pass

FUSED = {"use_fused_kernels": True}
OUTPUTS = ("log_probs", "entropy", "sum_pi_squared")


@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_and_gradient_are_those_of_the_models_own_head(tmp_path, family, tied):
    path = model_dir(tmp_path, family, tie_word_embeddings=tied)
    batch = ragged_batch()
    own, fused = make_engine(path), make_engine(path, model=FUSED)
    assert own.forward.fused is None and fused.forward.fused is not None
    expected, found = (engine.infer(batch, OUTPUTS, temperature=0.8) for engine in (own, fused))
    for name in OUTPUTS:
        assert relative_error(found[name], expected[name]) < 1e-5
    loss_fn = policy_loss(entropy_coeff=0.01)
    (loss, gradient), (again, other) = (gradients(e, batch, loss_fn, temperature=0.8) for e in (own, fused))
    assert again == pytest.approx(loss, rel=1e-5, abs=1e-7) and relative_error(other, gradient) < 1e-5


def test_the_logits_are_never_made(tmp_path):
    path = model_dir(tmp_path, "qwen2")
    engine = make_engine(path, model=FUSED)
    widths = []
    engine.model.lm_head.register_forward_hook(lambda module, inputs, output: widths.append(output.shape[-1]))
    engine.train_batch(ragged_batch(), policy_loss(entropy_coeff=0.01))
    assert widths and set(widths) == {1}
    plain = make_engine(path)
    plain.model.lm_head.register_forward_hook(lambda module, inputs, output: widths.append(output.shape[-1]))
    plain.infer(ragged_batch())
    assert widths[-1] == 259


@pytest.mark.parametrize(
    "loss_fn, model",
    [
        (SFTLoss(), {}),
        (PPOPolicyLoss(ActorConfig()), {}),
        (PPOPolicyLoss(ActorConfig(use_kl_loss=True)), {"lora_rank": 4, "target_modules": ["q_proj"]}),
    ],
    ids=["supervised", "on policy", "frozen head"],
)
def test_where_slopes_are_known_or_the_head_is_frozen_each_logit_is_computed_once(
    tmp_path, monkeypatch, loss_fn, model
):
    swept, again = [], []
    monkeypatch.setattr(apply, "sweep", lambda *a, f=apply.sweep: (swept.append(len(a[0])), f(*a))[1])
    monkeypatch.setattr(one_pass, "gradients", lambda *a, f=one_pass.gradients: (again.append(1), f(*a))[1])
    batch = ragged_batch()
    batch.batch["ref_log_prob"] = batch.batch["old_log_probs"].nan_to_num() - 0.1
    if not model:
        del batch.batch["old_log_probs"]
    path, sums = model_dir(tmp_path, "qwen2"), {"micro_batch_size": 2, "temperature": 0.8}
    expected_loss, expected = gradients(make_engine(path, model=model), batch, loss_fn, **sums)
    assert not swept
    loss, found = gradients(make_engine(path, model={**FUSED, **model}), batch, loss_fn, **sums)
    assert sum(swept) == int(batch.batch["response_mask"].sum()) and not again
    assert loss == pytest.approx(expected_loss, rel=1e-5, abs=1e-7) and relative_error(found, expected) < 1e-5


def test_an_epoch_off_policy_takes_tiles(tmp_path, monkeypatch):
    monkeypatch.setattr(apply, "sweep", None)
    make_engine(model_dir(tmp_path, "qwen2"), model=FUSED).train_batch(ragged_batch(), PPOPolicyLoss(ActorConfig()))


def test_bf16_gives_the_same_up_to_its_rounding(tmp_path):
    path, batch = model_dir(tmp_path, "qwen2"), ragged_batch()
    own, fused = (make_engine(path, engine={"dtype": "bfloat16"}, model=m) for m in ({}, FUSED))
    expected, found = (engine.infer(batch)["log_probs"] for engine in (own, fused))
    assert relative_error(found, expected) < 1e-3
    (_, gradient), (_, other) = (gradients(engine, batch, policy_loss(entropy_coeff=0.01)) for engine in (own, fused))
    assert relative_error(other, gradient) < 2e-2


def test_the_automatic_micro_batch_is_larger_without_logits(tmp_path):
    path = model_dir(tmp_path, "qwen2", vocab=259)
    own, fused = make_engine(path), make_engine(path, model=FUSED)
    rows = ragged_batch().batch
    assert own.forward.logits_per_token == 259 and fused.forward.logits_per_token == 0 and len(rows) == 6


def test_a_head_that_does_more_than_a_linear_map_is_an_error(tmp_path, monkeypatch):
    from transformers import Qwen2ForCausalLM

    original = Qwen2ForCausalLM.forward

    def forward(self, *args, **kwargs):
        found = original(self, *args, **kwargs)
        found.logits = found.logits * 2.0
        return found

    monkeypatch.setattr(Qwen2ForCausalLM, "forward", forward)
    with pytest.raises(EngineError, match=r"use_fused_kernels.*own head"):
        make_engine(model_dir(tmp_path, "qwen2"), model=FUSED)


@pytest.mark.parametrize(
    "passes",
    [
        PassSettings(entropy_chunk=3),
        PassSettings(entropy_again=True),
        PassSettings(entropy_chunk=2, entropy_again=True),
    ],
    ids=["in pieces", "computed again", "both"],
)
def test_the_memory_saving_entropy_changes_no_number(tmp_path, passes, monkeypatch):
    from verl.engines import forward

    path, batch = model_dir(tmp_path, "qwen2"), ragged_batch()
    calls = []
    for name in ("entropy_from_logits", "entropy_from_logits_with_chunking"):
        original = getattr(forward, name)
        monkeypatch.setattr(forward, name, lambda *a, f=original, n=name: (calls.append((n, *a[1:])), f(*a))[1])
    expected_loss, expected = gradients(make_engine(path), batch, policy_loss(entropy_coeff=0.01))
    plain_calls = len(calls)
    loss, found = gradients(make_engine(path, passes=passes), batch, policy_loss(entropy_coeff=0.01))
    assert loss == pytest.approx(expected_loss) and relative_error(found, expected) < 1e-6
    again = calls[plain_calls:]
    assert len(again) == plain_calls * (2 if passes.entropy_again else 1)
    assert all(call[1:] == ((passes.entropy_chunk,) if passes.entropy_chunk else ()) for call in again)
    assert torch.isfinite(found).all()
