"""Log-probs of several tokens per position: the most likely ones of a model, and another model's of the same tokens."""

import pytest
import torch

from tests.harness.engines import gradients, make_engine, padded_logits, ragged_batch
from verl.algorithms.distillation import DistilledPolicyLoss
from verl.algorithms.losses import PPOPolicyLoss
from verl.config import ActorConfig
from verl.config.schema.algorithm import DistillationLossConfig
from verl.engines.settings import PassSettings
from verl.errors import EngineError

TEMPERATURE, K = 0.7, 5


@pytest.fixture(params=[False, True], ids=["plain head", "fused head"])
def is_fused(request, monkeypatch):
    """Whether the head is fused: it has the logits of two tokens at a time then."""
    monkeypatch.setattr("verl.models.fused_head.listed.NUMBERS", 600)
    return request.param


def oracle(engine, batch):
    """(B, T, V) log-probs in float64, from one padded pass with an attention mask."""
    return torch.log_softmax(padded_logits(engine.model.eval(), batch).double() / TEMPERATURE, -1)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("limits", [{}, {"micro_batch_size": 1}])
def test_a_model_lists_its_most_likely_tokens(qwen2, is_fused, packed, limits):
    passes = PassSettings(packed=packed, top_k=K, fused_head="torch" if is_fused else None)
    engine, batch = make_engine(qwen2, trains=False, passes=passes), ragged_batch(seed=3)
    computed = engine.infer(batch, ("log_probs", "top_k_ids", "top_k_log_probs"), TEMPERATURE, **limits)
    values, ids = oracle(engine, batch).topk(K, dim=-1)
    mask = batch.tensors["response_mask"].bool()
    assert computed["top_k_ids"].dtype == torch.int32 and computed["top_k_ids"].shape == (*mask.shape, K)
    assert torch.equal(computed["top_k_ids"][mask].long(), ids[mask])
    torch.testing.assert_close(computed["top_k_log_probs"][mask].double(), values[mask], atol=1e-5, rtol=1e-5)
    assert not computed["top_k_log_probs"][~mask].any()


@pytest.mark.parametrize("packed", [False, True])
def test_another_model_gives_log_probs_of_the_listed_tokens(qwen2, is_fused, packed):
    passes = PassSettings(packed=packed, fused_head="torch" if is_fused else None)
    engine, batch = make_engine(qwen2, passes=passes), ragged_batch(seed=3)
    expected = oracle(engine, batch)
    ids = torch.randint(0, expected.shape[-1], (*expected.shape[:-1], K), generator=torch.Generator().manual_seed(1))
    batch.tensors["candidate_ids"] = ids.int()
    mask = batch.tensors["response_mask"].bool()
    computed = engine.infer(batch, ("candidate_log_probs",), TEMPERATURE, micro_batch_size=2)["candidate_log_probs"]
    torch.testing.assert_close(computed[mask].double(), expected.gather(-1, ids)[mask], atol=1e-5, rtol=1e-5)


def test_the_gradient_of_distillation_is_that_of_the_padded_oracle(qwen2, is_fused):
    engine, batch = make_engine(qwen2, model={"use_fused_kernels": is_fused}), ragged_batch(seed=3)
    log_probs = oracle(engine, batch)
    of_teacher = torch.log_softmax(torch.randn(log_probs.shape, generator=torch.Generator().manual_seed(2)), -1)
    values, ids = of_teacher.topk(K, dim=-1)
    batch.tensors["candidate_ids"], batch.tensors["candidate_teacher_log_probs"] = ids.int(), values
    settings = DistillationLossConfig(loss_mode="forward_kl_topk", use_task_rewards=False)
    loss_fn = DistilledPolicyLoss(PPOPolicyLoss(ActorConfig()), settings)
    loss, computed = gradients(engine, batch, loss_fn, temperature=TEMPERATURE, micro_batch_size=2)
    mask = batch.tensors["response_mask"].bool()
    tokens = (values.double().exp() * (values.double() - log_probs.gather(-1, ids))).sum(-1)
    value = tokens[mask].sum() / mask.sum()
    trained = [p for p in engine.model.parameters() if p.requires_grad]
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(value, trained)])
    assert loss == pytest.approx(value.item(), rel=1e-5)
    torch.testing.assert_close(computed, expected, atol=1e-6, rtol=1e-3)


def test_a_vocabulary_below_k_is_listed_completely(qwen2):
    engine = make_engine(qwen2, trains=False, passes=PassSettings(top_k=10**6))
    computed = engine.infer(ragged_batch(), ("top_k_log_probs",))["top_k_log_probs"]
    mask = ragged_batch().tensors["response_mask"].bool()
    assert computed.shape[-1] == engine.model.config.vocab_size
    assert computed.exp().sum(-1)[mask].tolist() == pytest.approx([1.0] * int(mask.sum()), abs=1e-5)


def test_a_batch_without_the_listed_tokens_names_the_column(qwen2):
    with pytest.raises(EngineError, match="candidate_ids"):
        make_engine(qwen2).infer(ragged_batch(), ("candidate_log_probs",))
