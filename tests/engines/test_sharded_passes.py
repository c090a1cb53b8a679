"""Packed rows, shared prompts and the fused head under the sharded engines: the numbers of the plain engine."""

from __future__ import annotations

import pytest
import torch

from tests.harness.engines import grouped_batch, make_engine, model_dir
from verl.algorithms.losses import PPOPolicyLoss
from verl.config import ActorConfig, FSDPEngineConfig, HFModelConfig, OptimizerConfig
from verl.engines.settings import PassSettings
from verl.registry import ENGINES

PASSES = {
    "padded": PassSettings(packed=False),
    "packed": PassSettings(),
    "shared and fused": PassSettings(share_prompts=True, fused_head="torch"),
}


pytestmark = pytest.mark.usefixtures("group")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return model_dir(tmp_path_factory.mktemp("models"), "qwen2", tie_word_embeddings=True)


@pytest.mark.parametrize("passes", PASSES)
def test_two_steps_leave_the_weights_of_the_plain_engine(path, passes):
    batch, loss_fn = grouped_batch(), PPOPolicyLoss(ActorConfig(entropy_coeff=0.01))
    plain = make_engine(path, passes=PassSettings(packed=False), seed=3, optim={"lr": 1e-2, "optimizer": "SGD"})
    ours = ENGINES.get("fsdp2")(
        HFModelConfig(path=str(path)),
        FSDPEngineConfig(),
        OptimizerConfig(lr=1e-2, optimizer="SGD"),
        total_training_steps=10,
        seed=3,
        passes=PASSES[passes],
    )
    assert ours.forward.passes == PASSES[passes]
    for _ in range(2):
        expected = plain.train_batch(batch, loss_fn, temperature=0.8).values()
        found = ours.train_batch(batch, loss_fn, temperature=0.8, max_tokens=60).values()
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5, abs=1e-7)
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    weights = dict(plain.export_weights())
    for name, tensor in ours.export_weights():
        torch.testing.assert_close(tensor, weights[name], atol=1e-6, rtol=1e-5)
