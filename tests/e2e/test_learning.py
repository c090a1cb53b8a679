"""GRPO and PPO raise the held-out accuracy of the quickstart model; the curve is read from the run's metrics."""

from __future__ import annotations

import pytest
from transformers import AutoModelForCausalLM

from tests.e2e.runs import command, curve, metrics

pytestmark = pytest.mark.e2e
ACCURACY = "val-core/arithmetic/reward/mean@1"


def learn(arithmetic, name: str, steps: int, *arguments: str) -> list[dict]:
    command(
        "verl.trainer.main_ppo",
        *arithmetic.arguments,
        f"trainer.experiment_name={name}",
        f"trainer.total_training_steps={steps}",
        f"trainer.test_freq={steps}",
        f"trainer.default_local_dir={name}",
        *arguments,
        cwd=arithmetic.folder,
    )
    return metrics(arithmetic.folder, "e2e", name)


def test_grpo_raises_the_held_out_accuracy_and_leaves_a_loadable_model(arithmetic):
    steps = learn(
        arithmetic,
        "grpo",
        60,
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.actor.optim.lr=3e-4",
        "trainer.save_freq=60",
        "actor_rollout_ref.actor.checkpoint.save_contents=[model]",
    )
    before, *_, after = curve(steps, ACCURACY)
    rewards = curve(steps, "critic/score/mean")
    assert before < 0.8
    assert after > before + 0.1
    assert sum(rewards[-10:]) / 10 > sum(rewards[:10]) / 10 + 0.1
    model = AutoModelForCausalLM.from_pretrained(arithmetic.folder / "grpo/global_step_60/actor/huggingface")
    assert model.config.model_type == "qwen2"


def test_ppo_with_a_critic_raises_the_held_out_accuracy(arithmetic):
    steps = learn(
        arithmetic,
        "ppo",
        60,
        "algorithm.adv_estimator=gae",
        "actor_rollout_ref.rollout.n=4",
        "data.train_batch_size=128",
        "actor_rollout_ref.actor.ppo_mini_batch_size=64",
        "actor_rollout_ref.actor.optim.lr=3e-4",
        "critic.optim.lr=1e-3",
        "critic.ppo_mini_batch_size=64",
        "trainer.critic_warmup=5",
    )
    before, *_, after = curve(steps, ACCURACY)
    assert after > before + 0.1
    losses = curve(steps, "critic/vf_loss")
    assert sum(losses[-10:]) < sum(losses[:10]), "the critic learns to predict the return"
    assert "actor/pg_loss" not in steps[3], "during the warm-up the actor is not updated"
