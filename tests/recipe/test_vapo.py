"""VAPO: its settings, its advantages and its loss written out in numpy, and a critic that learns before the policy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from recipe.vapo.main_vapo import PRETRAINING, VAPO, main
from tests.harness.runs import logged
from verl.algorithms.aggregation import loss_norm
from verl.algorithms.losses import PPOPolicyLoss
from verl.config import PPOTrainerConfig, load_config
from verl.registry import ADVANTAGE_ESTIMATORS

A = "actor_rollout_ref.actor"
REQUIRED = ["data.train_files=train.jsonl", "data.train_batch_size=8", "data.max_prompt_length=64",
            "data.max_response_length=6", "actor_rollout_ref.model.path=model", f"{A}.ppo_mini_batch_size=4",
            "reward.custom_reward_function.path=scorer.py"]  # fmt: skip


@pytest.fixture
def config(lower_case_task: Path) -> PPOTrainerConfig:
    return load_config("ppo_trainer", [*VAPO, *REQUIRED])


def test_the_settings_are_those_of_the_paper(config):
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    assert (actor.clip_ratio_low, actor.clip_ratio_high, actor.loss_agg_mode) == (0.2, 0.28, "token-mean")
    assert (actor.positive_lm_coef, actor.optim.lr, config.critic.optim.lr) == (0.1, 1e-6, 2e-6)
    assert (algorithm.vapo_length_alpha, algorithm.vapo_lam_critic, algorithm.gamma) == (0.05, 1.0, 1.0)
    assert config.trainer.critic_warmup == PRETRAINING + 1 == 51 and config.actor_rollout_ref.rollout.n == 16
    assert not actor.use_kl_loss and not algorithm.use_kl_in_reward


def written_out(rewards: np.ndarray, values: np.ndarray, lengths: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """The paper's sums, term by term: A_t = sum_k lambda^k delta_(t+k), returns = rewards to go."""
    advantages, returns = np.zeros_like(rewards), np.zeros_like(rewards)
    for i, length in enumerate(lengths):
        lam = max(0.0, 1 - 1 / (0.05 * length))
        following = np.append(values[i, 1:length], 0.0)
        delta = rewards[i, :length] + following - values[i, :length]
        for t in range(length):
            advantages[i, t] = sum(lam**k * delta[t + k] for k in range(length - t))
            returns[i, t] = rewards[i, t:length].sum()
    return advantages, returns


def test_advantages_and_targets_are_the_sums_of_the_paper(config):
    """Three answers of 12, 30 and 50 tokens: lambda 0, 1/3 and 3/5."""
    lengths, draw = [12, 30, 50], np.random.default_rng(0)
    mask = (np.arange(50) < np.array(lengths)[:, None]).astype(float)
    values, rewards = draw.normal(size=(3, 50)) * mask, np.zeros((3, 50))
    rewards[[0, 1, 2], np.array(lengths) - 1] = [1.0, -0.5, 2.0]
    estimator = ADVANTAGE_ESTIMATORS.get(config.algorithm.adv_estimator)
    tensors = [torch.tensor(x) for x in (rewards, values, mask)]
    advantages, returns = estimator(*tensors, config=config.algorithm, gamma=config.algorithm.gamma)
    raw, expected = written_out(rewards, values, lengths)
    np.testing.assert_allclose(returns.numpy(), expected, atol=1e-9)
    inside = raw[mask.astype(bool)]
    whitened = (raw - inside.mean()) / inside.std(ddof=1) * mask
    np.testing.assert_allclose(advantages.numpy(), whitened, rtol=1e-6, atol=1e-7)


def test_the_loss_is_clipped_and_has_a_tenth_of_the_nll_of_right_answers(config):
    """One token is clipped above 1.28, one with a negative advantage below 0.8; row 0 is right."""
    ratio = np.array([[1.5, 1.1], [0.5, 1.0]])
    advantage, log_prob = np.array([[1.0, -2.0], [-1.0, 0.5]]), np.array([[-1.0, -2.0], [-3.0, -0.5]])
    clipped = np.clip(ratio, 0.8, 1.28)
    surrogate = np.maximum(-ratio * advantage, -clipped * advantage).mean()
    expected = surrogate + 0.1 * (1.0 + 2.0) / 2
    mask = torch.ones(2, 2)
    batch = {
        "response_mask": mask,
        "advantages": torch.tensor(advantage),
        "old_log_probs": torch.tensor(log_prob - np.log(ratio)),
        "positive_lm_weights": torch.tensor([[0.5, 0.5], [0.0, 0.0]], dtype=torch.float64),
    }
    loss, _ = PPOPolicyLoss(config.actor_rollout_ref.actor)(
        {"log_probs": torch.tensor(log_prob)}, batch, loss_norm(mask)
    )
    assert loss.item() == pytest.approx(expected, rel=1e-9)


def test_the_critic_learns_first_and_the_policy_from_the_named_step_on(lower_case_task: Path):
    more = ["trainer.critic_warmup=3", "trainer.total_training_steps=3", "actor_rollout_ref.rollout.n=2",
            "trainer.logger=[file]", "trainer.resume_mode=disable", "trainer.experiment_name=vapo",
            "critic.optim.lr=1e-2"]  # fmt: skip
    assert main([*REQUIRED, *more]) == 0
    steps = logged("logs/verl-vapo", "vapo")
    assert ["actor/grad_norm" in step for step in steps] == [False, False, True]
    assert all(step["critic/grad_norm"] > 0 for step in steps)
    assert "actor/positive_nll" in steps[2]
