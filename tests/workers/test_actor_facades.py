"""The actor under upstream's names makes the update that a worker's actor makes."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.harness.engines import make_engine, model_dir, ragged_batch
from verl.config import ActorConfig, PolicyLossConfig
from verl.errors import EngineError
from verl.workers.actor import BasePPOActor
from verl.workers.actor.dp_actor import DataParallelPPOActor
from verl.workers.actor.megatron_actor import MegatronPPOActor

LR, CLIP, EPS = 1e-2, 0.5, 1e-4
"""A large epsilon of Adam: rounding of the smallest gradients, which depends on the processor, stays small."""
SETTINGS = {"ppo_mini_batch_size": 6, "ppo_micro_batch_size_per_gpu": 2, "grad_clip": CLIP, "entropy_coeff": 0.01}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return model_dir(tmp_path_factory.mktemp("actor"))


@pytest.fixture
def batch():
    made = ragged_batch(rows=6)
    for name in ("advantages", "old_log_probs"):
        made.batch[name] = torch.where(made.batch["response_mask"].bool(), made.batch[name], 0.0)
    made.meta_info["temperature"] = 0.7
    return made


def built(folder, **settings) -> DataParallelPPOActor:
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(module.parameters(), lr=LR, betas=(0.9, 0.999), eps=EPS, weight_decay=0.01)
    return DataParallelPPOActor(ActorConfig(**{**SETTINGS, **settings}), module, optimizer)


def test_log_probs_and_entropies_are_those_of_the_module(folder, batch):
    actor = built(folder)
    log_probs, entropies = actor.compute_log_prob(batch, calculate_entropy=True)
    tensors, mask = batch.batch, batch.batch["response_mask"].bool()
    positions = (tensors["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    inputs = {"input_ids": tensors["input_ids"], "attention_mask": tensors["attention_mask"]}
    with torch.no_grad():
        logits = actor.actor_module(**inputs, position_ids=positions).logits[:, -mask.size(1) - 1 : -1] / 0.7
    expected = logits.log_softmax(-1)
    chosen = expected.gather(-1, tensors["responses"].unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(log_probs[mask], chosen[mask], atol=2e-5, rtol=0)
    torch.testing.assert_close(entropies[mask], -(expected.exp() * expected).sum(-1)[mask], atol=2e-5, rtol=0)
    assert actor.compute_log_prob(batch)[1] is None


@pytest.mark.parametrize("form", [BasePPOActor, MegatronPPOActor])
def test_a_given_module_learns_what_the_same_model_learns_in_an_engine_of_its_own(folder, batch, form):
    optim = {"lr": LR, "override_optimizer_config": {"eps": EPS}}
    engine = make_engine(folder, optim=optim, grad_clip=CLIP)
    other = form(ActorConfig(**SETTINGS, ppo_epochs=2), engine)
    actor = built(folder, ppo_epochs=2)
    assert actor.update_policy(batch) == pytest.approx(other.update_policy(batch), rel=1e-4, abs=1e-6)
    weights = dict(engine.export_weights())
    for name, value in actor.part.engine.export_weights():
        torch.testing.assert_close(value, weights[name], atol=1e-3 * LR, rtol=0)  # a step moves a weight by about LR


@pytest.mark.parametrize("loss", ["vanilla", "gspo", "gpg", "clip_cov", "kl_cov", "geo_mean"])
def test_importance_weights_reach_every_loss_that_the_guide_names(folder, batch, loss):
    weighted, moved = copy.deepcopy(batch), {}
    weighted.batch["rollout_is_weights"] = torch.full_like(batch.batch["advantages"], 0.25)
    for name, data in (("plain", batch), ("weighted", weighted)):
        moved[name] = built(folder, policy_loss=PolicyLossConfig(loss_mode=loss)).update_policy(data)
    assert moved["weighted"]["actor/pg_loss"] == pytest.approx(0.25 * moved["plain"]["actor/pg_loss"], rel=1e-4)


def test_without_an_optimizer_it_gives_log_probs_and_refuses_to_learn(folder, batch):
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    actor = DataParallelPPOActor(ActorConfig(**SETTINGS), module)
    assert actor.compute_log_prob(batch)[0].shape == batch.batch["responses"].shape
    with pytest.raises(EngineError, match="frozen"):
        actor.update_policy(batch)
