"""GKD: the loss of its settings in numpy, and a student that comes nearer to its teacher."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from recipe.gkd.main_gkd import GKD, main
from tests.harness.configs import changed
from tests.harness.models import tiny_model_dir
from tests.harness.runs import logged
from verl.algorithms.aggregation import loss_norm
from verl.algorithms.distillation import OF_CANDIDATES, DistilledPolicyLoss
from verl.algorithms.losses import PPOPolicyLoss
from verl.config import load_config

A, L = "actor_rollout_ref.actor", "distillation.distillation_loss"
REQUIRED = ("data.train_files=train.jsonl", "data.train_batch_size=8", "data.max_prompt_length=64",
            "data.max_response_length=6", "actor_rollout_ref.model.path=model", f"{A}.ppo_mini_batch_size=8",
            "reward.custom_reward_function.path=scorer.py",
            "distillation.teacher_models.teacher_model.model_path=teacher")  # fmt: skip


@pytest.fixture
def task(lower_case_task: Path) -> Path:
    tiny_model_dir("teacher", hidden=16, heads=2, kv_heads=1, layers=1, seed=1, initializer_range=0.5)
    return lower_case_task


def test_the_loss_is_the_jensen_shannon_divergence_of_the_samples(task: Path):
    """Four tokens, all of them listed: the mean over three positions, one is masked."""
    config = load_config("ppo_trainer", changed(GKD, *REQUIRED))
    draw = np.random.default_rng(0)
    student, teacher = (np.log(draw.dirichlet(np.ones(4), size=(2, 2))) for _ in range(2))
    mask = torch.tensor([[1, 1], [1, 0]])
    loss_fn = DistilledPolicyLoss(PPOPolicyLoss(config.actor_rollout_ref.actor), config.distillation.distillation_loss)
    outputs = {"candidate_log_probs": torch.tensor(student), "log_probs": torch.zeros(2, 2, dtype=torch.float64)}
    batch = {"response_mask": mask, OF_CANDIDATES: torch.tensor(teacher)}
    loss, _ = loss_fn(outputs, batch, loss_norm(mask))
    s, t = np.exp(student), np.exp(teacher)
    m = (s + t) / 2
    divergence = 0.5 * (t * np.log(t / m)).sum(-1) + 0.5 * (s * np.log(s / m)).sum(-1)
    assert loss.item() == pytest.approx(divergence[mask.numpy().astype(bool)].mean(), abs=1e-5)
    assert loss_fn.outputs == ("log_probs", "candidate_log_probs"), "no entropy or reward enters"


def test_a_student_comes_nearer_to_its_teacher(task: Path):
    more = [f"{A}.optim.lr=3e-2", f"{L}.topk=259", "trainer.total_training_steps=12", "trainer.logger=[file]",
            "trainer.resume_mode=disable", "trainer.experiment_name=gkd"]  # fmt: skip
    assert main([*REQUIRED, *more]) == 0
    losses = [step["distillation/loss"] for step in logged("logs/verl-gkd", "gkd")]
    assert len(losses) == 12 and sum(losses[-2:]) < 0.95 * sum(losses[:2]), losses
