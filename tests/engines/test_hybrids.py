"""Layers that carry a state from token to token: no sequence of a packed row sees another one, forward or backward."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engines.hybrids import PACKED, PADDED, hybrid_dir
from tests.harness.engines import gradients, grouped_batch, make_engine, relative_error
from verl.algorithms.losses import PPOPolicyLoss
from verl.config import ActorConfig
from verl.config.machine.config_json import NEVER_PACKED, NOT_SAMPLED, carries_state
from verl.engines.settings import PassSettings
from verl.errors import RolloutError
from verl.metrics import notices, reset_notices
from verl.models.attention import interface
from verl.rollout.hf.probe import padded_runner

EXACT = 1e-5
LOSS = PPOPolicyLoss(ActorConfig())
SHARED = PassSettings(share_prompts=True)
UNPACKED = {"use_remove_padding": False}


def batch_of(response):
    return grouped_batch(prompts=2, samples=3, prompt=9, response=response)


def row_by_row(path, batch):
    """(B, T) log-probs of transformers' own model, one sequence at a time, zero where nothing is trained on."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tensors, expected = batch.batch, torch.zeros(batch.batch["responses"].shape)
    prompt = tensors["prompts"].shape[1]
    for row, attended in enumerate(tensors["attention_mask"].bool()):
        ids, first = tensors["input_ids"][row][attended], int(attended[:prompt].sum())
        with torch.no_grad():
            log_probs = model(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
        expected[row, attended[prompt:]] = log_probs[first - 1 : -1].gather(-1, ids[first:, None]).squeeze(-1)
    return expected * tensors["response_mask"]


@pytest.mark.parametrize("family", PACKED)
def test_packed_rows_with_shared_prompts_are_rows_one_by_one(tmp_path, family):
    path, batch = hybrid_dir(tmp_path, family), batch_of(response=40)
    reset_notices()
    packed = make_engine(path, model={"enable_gradient_checkpointing": True}, passes=SHARED)
    alone = make_engine(path, model=UNPACKED)
    assert packed.forward.passes == SHARED and not any("cannot be packed" in text for text in notices().values())
    found = packed.infer(batch, ("log_probs",))["log_probs"] * batch.batch["response_mask"]
    assert relative_error(found, row_by_row(path, batch)) <= EXACT
    (loss, found), (expected_loss, expected) = (
        gradients(packed, batch, LOSS),
        gradients(alone, batch, LOSS, micro_batch_size=1),
    )
    assert loss == pytest.approx(expected_loss, rel=EXACT)
    assert relative_error(found, expected) <= EXACT


@pytest.mark.parametrize("family", PADDED)
def test_other_families_are_padded_with_a_notice_and_padding_changes_nothing(tmp_path, family):
    path, batch = hybrid_dir(tmp_path, family), batch_of(response=12)
    reset_notices()
    engine = make_engine(path)
    assert not engine.packs and any("cannot be packed" in text for text in notices().values())
    found = engine.infer(batch, ("log_probs",), micro_batch_size=6)["log_probs"] * batch.batch["response_mask"]
    assert relative_error(found, row_by_row(path, batch)) <= EXACT


def test_a_state_that_runs_through_a_packed_row_is_seen_and_the_model_is_padded(tmp_path, monkeypatch):
    monkeypatch.setattr(interface, "take_over", lambda model, mixers: [])
    monkeypatch.setattr(interface, "give_back", lambda mixers, hooks: None)
    assert not make_engine(hybrid_dir(tmp_path, "qwen3_5_text")).packs


@pytest.mark.parametrize("family", [*PACKED, *PADDED])
def test_what_config_json_says_is_what_the_model_does(tmp_path, family):
    path = hybrid_dir(tmp_path, family)
    facts = json.loads((path / "config.json").read_text())
    assert carries_state(facts) and (family in PADDED) == (family in NEVER_PACKED)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    if family not in NOT_SAMPLED:
        padded_runner(model, 64)  # compares sampled logits with plain passes
        return
    with pytest.raises(RolloutError, match="the hf sampler cannot run"):
        padded_runner(model, 64)
