"""From equal weights an optimizer step does not depend on how the mini-batch is cut, ordered, or padded."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.harness.engines import gradients, make_engine, model_dir, ragged_batch, relative_error
from verl.algorithms.losses import PPOPolicyLoss, PPOValueLoss, SFTLoss
from verl.config import ActorConfig, CriticConfig
from verl.config.schema.node import from_mapping
from verl.protocol import DataProto

ROWS = 7
MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return model_dir(tmp_path_factory.mktemp("models"), "qwen2", layers=1)


@pytest.fixture(scope="module")
def policy(path):
    return make_engine(path)


@pytest.fixture(scope="module")
def critic(path):
    engine = make_engine(path, kind="value")
    torch.nn.init.normal_(engine.model.score.weight, generator=torch.Generator().manual_seed(0))
    return engine


def policy_loss(mode: str) -> PPOPolicyLoss:
    return PPOPolicyLoss(ActorConfig(loss_agg_mode=mode, entropy_coeff=0.01))


limits = st.one_of(
    st.builds(lambda n: {"micro_batch_size": n}, st.integers(1, ROWS)),
    st.builds(lambda n: {"max_tokens": n}, st.integers(12, 90)),
    st.just({}),
)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(limit=limits, mode=st.sampled_from(MODES), seed=st.integers(0, 5), order=st.permutations(range(ROWS)))
def test_policy_loss_and_gradient_do_not_depend_on_the_cut(policy, limit, mode, seed, order):
    batch = ragged_batch(rows=ROWS, seed=seed)
    loss, gradient = gradients(policy, batch, policy_loss(mode), micro_batch_size=ROWS)
    shuffled = DataProto(batch=batch.batch[torch.tensor(order)])
    again, found = gradients(policy, shuffled, policy_loss(mode), **limit)
    assert again == pytest.approx(loss, rel=1e-5, abs=1e-7)
    assert torch.isfinite(found).all() and relative_error(found, gradient) < 1e-5


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(limit=limits, mode=st.sampled_from(MODES), seed=st.integers(0, 5))
def test_value_loss_and_gradient_do_not_depend_on_the_cut(critic, limit, mode, seed):
    batch = ragged_batch(rows=ROWS, seed=seed)
    loss_fn = PPOValueLoss(CriticConfig(loss_agg_mode=mode))
    loss, gradient = gradients(critic, batch, loss_fn, micro_batch_size=ROWS)
    again, found = gradients(critic, batch, loss_fn, **limit)
    assert again == pytest.approx(loss, rel=1e-5, abs=1e-7)
    assert relative_error(found, gradient) < 1e-5


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(limit=limits, seed=st.integers(0, 5))
def test_inference_does_not_depend_on_the_cut(policy, limit, seed):
    batch = ragged_batch(rows=ROWS, seed=seed)
    expected = policy.infer(batch, ("log_probs", "entropy"), micro_batch_size=ROWS)
    found = policy.infer(batch, ("log_probs", "entropy"), **limit)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_of_the_bypass_mode_are_normalised_over_the_mini_batch_however_it_is_cut(policy, level):
    """The loss is linear in its weights: with their mean m it is the loss without normalisation over m."""
    batch = ragged_batch(rows=ROWS)
    correction = {"bypass_mode": True, "loss_type": "reinforce", "rollout_is": level, "rollout_is_threshold": 1.1}

    def loss_fn(normalize: bool) -> PPOPolicyLoss:
        settings = {"rollout_correction": {**correction, "rollout_is_batch_normalize": normalize}}
        return PPOPolicyLoss(from_mapping(ActorConfig, {"policy_loss": settings}))

    old, mask = batch.tensors["old_log_probs"], batch.tensors["response_mask"].bool()
    ratios = torch.where(mask, policy.infer(batch)["log_probs"] - old, 0.0)
    weights = ratios.exp()[mask] if level == "token" else ratios.sum(-1).exp()[mask.any(-1)]
    mean = float(weights.clamp(max=1.1).mean())
    assert abs(mean - 1) > 0.05
    loss, gradient = gradients(policy, batch, loss_fn(False))
    for limit in ({}, {"micro_batch_size": 2}, {"micro_batch_size": 1}):
        again, found = gradients(policy, batch, loss_fn(True), **limit)
        assert again == pytest.approx(loss / mean, rel=1e-5)
        assert relative_error(found, gradient / mean) < 1e-5
    assert policy.train_batch(batch, loss_fn(True)).values()["rollout_corr/rollout_is_batch_norm_factor"] == (
        pytest.approx(mean, rel=1e-5)
    )


def test_metrics_do_not_depend_on_the_cut(policy):
    batch = ragged_batch(rows=ROWS)
    policy.optimizer.param_groups[0]["lr"] = 0.0
    whole, cut = (policy.train_batch(batch, policy_loss("token-mean"), micro_batch_size=n).values() for n in (ROWS, 2))
    assert set(whole) == set(cut)
    for name in whole:
        assert cut[name] == pytest.approx(whole[name], rel=1e-4, abs=1e-7), name


def test_more_padding_changes_nothing(policy):
    batch = ragged_batch(rows=ROWS)
    loss, gradient = gradients(policy, batch, SFTLoss())
    wide = {
        name: torch.nn.functional.pad(tensor, (3 if name in ("input_ids", "attention_mask", "prompts") else 0, 4))
        for name, tensor in batch.batch.items()
        if name not in ("prompts", "position_ids")
    }
    again, found = gradients(policy, DataProto.from_dict(tensors=wide), SFTLoss())
    assert again == pytest.approx(loss, rel=1e-6) and relative_error(found, gradient) < 1e-6
