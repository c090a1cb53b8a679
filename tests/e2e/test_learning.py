"""GRPO and PPO raise the held-out accuracy of the quickstart model; the curve is read from the run's metrics."""

from __future__ import annotations

import pytest
from transformers import AutoModelForCausalLM

from tests.harness.programs import curve, trained

pytestmark = pytest.mark.slow
ACCURACY = "val-core/arithmetic/reward/mean@1"


def learn(arithmetic, name: str, steps: int, *arguments: str) -> list[dict]:
    ends = (f"trainer.total_training_steps={steps}", f"trainer.test_freq={steps}")
    return trained(arithmetic.folder, name, *arithmetic.arguments, *ends, *arguments)


def test_grpo_raises_the_held_out_accuracy_and_leaves_a_loadable_model(arithmetic):
    steps = learn(
        arithmetic,
        "grpo",
        12,
        "algorithm.adv_estimator=grpo",
        "trainer.save_freq=12",
        "actor_rollout_ref.actor.checkpoint.save_contents=[model]",
    )
    before, *_, after = curve(steps, ACCURACY)
    rewards = curve(steps, "critic/score/mean")
    assert before <= 0.6
    assert after >= 0.9
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2
    model = AutoModelForCausalLM.from_pretrained(arithmetic.folder / "grpo/global_step_12/actor/huggingface")
    assert model.config.model_type == "qwen2"


def test_ppo_with_a_critic_raises_the_held_out_accuracy(arithmetic):
    steps = learn(
        arithmetic,
        "ppo",
        16,
        "algorithm.adv_estimator=gae",
        "critic.optim.lr=1e-3",
        "trainer.critic_warmup=5",
    )
    before, *_, after = curve(steps, ACCURACY)
    assert before <= 0.6
    assert after >= 0.9
    losses = curve(steps, "critic/vf_loss")
    assert sum(losses[-5:]) < sum(losses[:5]), "the critic learns to predict the return"
    updates = ["actor/pg_loss" in step for step in steps if step["step"] > 0]
    assert updates == [False] * 4 + [True] * 12, "the actor waits for trainer.critic_warmup"


def test_an_adapter_learns_with_its_base_as_the_reference(arithmetic):
    """LoRA of rank 16 and a KL term; the checkpoint holds the adapter, and nothing of the base has moved."""
    steps = learn(
        arithmetic,
        "lora",
        10,
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.model.lora_rank=16",
        "actor_rollout_ref.model.lora_alpha=32",
        "actor_rollout_ref.actor.optim.lr=5e-3",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "trainer.save_freq=10",
    )
    before, *_, after = curve(steps, ACCURACY)
    assert before <= 0.6
    assert after >= 0.85
    first = next(step for step in steps if step["step"] == 1)
    assert abs(first["actor/kl_loss"]) < 1e-6, "the adapter starts as no change"
    assert curve(steps, "actor/kl_loss")[-1] > 1e-4
    saved = arithmetic.folder / "lora/global_step_10/actor/huggingface"
    assert (saved / "adapter_model.safetensors").is_file() and not (saved / "model.safetensors").exists()
