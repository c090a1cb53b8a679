"""The KL to the reference over the whole vocabulary: the reference runs inside the policy's passes."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.harness.engines import gradients, make_engine, padded_logits, ragged_batch
from verl.algorithms.losses import PPOPolicyLoss, SFTLoss
from verl.config import ActorConfig
from verl.engines.adapters import AdapterBaseEngine
from verl.errors import EngineError

LORA = {"lora_rank": 4, "lora_alpha": 8}
TEMPERATURE = 0.7


def moved(qwen2, lora=False, **arguments):
    """A policy some steps away from its reference, and the reference's own model."""
    engine = make_engine(qwen2, model={**(LORA if lora else {}), **arguments.pop("model", {})}, **arguments)
    for seed in range(3):
        engine.train_batch(ragged_batch(seed=seed), SFTLoss())
    engine.compare_with(AdapterBaseEngine(engine) if lora else make_engine(qwen2, trains=False))
    return engine, AutoModelForCausalLM.from_pretrained(qwen2).double().eval()


def oracle(model, reference, batch):
    """(B, T): sum_v p (log p - log q) in float64, from two padded passes with an attention mask."""
    p, q = (torch.log_softmax(padded_logits(one, batch).double() / TEMPERATURE, -1) for one in (model, reference))
    return torch.where(batch.batch["response_mask"].bool(), (p.exp() * (p - q)).sum(-1), 0.0)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_it_is_the_sum_over_the_vocabulary(qwen2, lora, packed):
    (engine, reference), batch = moved(qwen2, lora, model={"use_remove_padding": packed}), ragged_batch(seed=9)
    expected = oracle(engine.model.eval(), reference, batch).detach()
    assert expected.max() > 1e-3
    for limits in ({}, {"micro_batch_size": 1}):
        found = engine.infer(batch, ("log_probs", "full_kl"), TEMPERATURE, **limits)
        torch.testing.assert_close(found["full_kl"].double(), expected, atol=1e-6, rtol=1e-4)
        assert torch.equal(found["log_probs"], engine.infer(batch, ("log_probs",), TEMPERATURE, **limits)["log_probs"])


@pytest.mark.parametrize("lora", [False, True])
def test_in_the_loss_its_gradient_reaches_the_policy_alone(qwen2, lora):
    """Beside advantages of zero the loss is the KL: its gradient equals autograd's through the oracle."""
    (engine, reference), batch = moved(qwen2, lora), ragged_batch(seed=9)
    batch.tensors["advantages"] = torch.zeros_like(batch.tensors["advantages"])
    loss_fn = PPOPolicyLoss(ActorConfig(use_kl_loss=True, kl_loss_type="full", kl_loss_coef=0.5))
    loss, found = gradients(engine, batch, loss_fn, temperature=TEMPERATURE, micro_batch_size=2)
    value = 0.5 * oracle(engine.model.eval(), reference, batch).sum() / batch.batch["response_mask"].sum()
    trained = [p for p in engine.model.parameters() if p.requires_grad]
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(value, trained)])
    assert loss == pytest.approx(value.item(), rel=1e-4)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-3)


def test_a_policy_beside_its_own_weights_has_none(qwen2):
    engine = make_engine(qwen2)
    engine.compare_with(make_engine(qwen2, trains=False))
    found = engine.infer(ragged_batch(), ("full_kl",))["full_kl"]
    assert found.abs().max() < 1e-6


def test_without_a_reference_or_with_a_fused_head_it_is_refused(qwen2):
    with pytest.raises(EngineError, match="no reference policy beside it"):
        make_engine(qwen2).infer(ragged_batch(), ("full_kl",))
    engine = make_engine(qwen2, model={"use_fused_kernels": True})
    engine.compare_with(make_engine(qwen2, trains=False))
    with pytest.raises(EngineError, match="a fused head"):
        engine.infer(ragged_batch(), ("full_kl",))
