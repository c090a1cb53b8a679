"""The settings objects that the trainer passes fit the functions that read them."""

import pytest
import torch

from tests.harness.algorithms import loss_batch
from verl.algorithms.aggregation import loss_norm
from verl.algorithms.kl import FixedKLController, get_kl_controller
from verl.algorithms.losses import PPOPolicyLoss, PPOValueLoss
from verl.algorithms.schedules import build_schedule
from verl.config import ActorConfig, AlgoConfig, CriticConfig, OptimizerConfig


def test_losses_controllers_and_schedules_take_the_dataclasses():
    batch = loss_batch()
    outputs = {"log_probs": batch.pop("log_prob")}
    batch["old_log_probs"] = batch.pop("old_log_prob")
    config = ActorConfig(clip_ratio_high=0.28)
    loss, _ = PPOPolicyLoss(config)(outputs, batch, loss_norm(batch["response_mask"]))
    assert loss.item() == pytest.approx(0.204, abs=1e-6)
    assert PPOValueLoss(CriticConfig()).config.cliprange_value == 0.5
    assert isinstance(get_kl_controller(AlgoConfig().kl_ctrl), FixedKLController)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    assert build_schedule(optimizer, OptimizerConfig(lr_warmup_steps=4), 10).get_last_lr() == [0]
