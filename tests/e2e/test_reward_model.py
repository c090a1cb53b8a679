"""From pairs of answers to a reward model, and from its scores to a policy: each held-out number improves."""

from __future__ import annotations

import random

import pandas as pd
import pytest

from tests.harness.programs import curve, trained

pytestmark = pytest.mark.slow
RM_STEPS, PPO_STEPS = 24, 14


def write_pairs(folder) -> None:
    """The sum is chosen; rejected is what the pupil does (to go on after it) or a sum that is wrong by 1 or 10."""
    draw, rows = random.Random(0), []
    for messages in pd.read_parquet(folder / "data/sft.parquet")["messages"][:640]:
        question, answer = (message["content"] for message in messages)
        wrong = str(int(answer) + draw.choice([-10, -1, 1, 10])) if draw.random() < 0.3 else f"{answer}="
        rows.append({"prompt": question, "chosen": answer, "rejected": wrong})
    pd.DataFrame(rows[:512]).to_parquet(folder / "pairs.parquet")
    pd.DataFrame(rows[512:]).to_parquet(folder / "held_out_pairs.parquet")


def test_ppo_with_a_trained_reward_model_raises_its_score_near_the_policy_it_started_from(arithmetic):
    write_pairs(arithmetic.folder)
    rated = trained(
        arithmetic.folder,
        "rm",
        "data.train_files=pairs.parquet",
        "data.val_files=held_out_pairs.parquet",
        "data.train_batch_size=64",
        "data.max_length=32",
        f"model.path={arithmetic.model}",
        "optim.lr=1e-3",
        f"trainer.total_training_steps={RM_STEPS}",
        "trainer.test_freq=1",
        f"trainer.save_freq={RM_STEPS}",
        "checkpoint.save_contents=[model]",
        program="rm_trainer",
    )
    first, *_, last = curve(rated, "val/accuracy")
    assert last >= 0.7 and last >= first
    assert curve(rated, "val/loss")[-1] < 0.6 * curve(rated, "val/loss")[0]
    model = arithmetic.folder / f"rm/global_step_{RM_STEPS}/model/huggingface"
    words = [
        word for word in arithmetic.arguments if not word.startswith(("reward.custom", "actor_rollout_ref.rollout.n="))
    ]
    steps = trained(
        arithmetic.folder,
        "ppo_rm",
        *words,
        "algorithm.adv_estimator=gae",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.optim.lr=4e-4",
        f"critic.model.path={model}",
        "critic.optim.lr=1e-3",
        "reward_model.enable=true",
        f"reward_model.model.path={model}",
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.kl_coef=0.2",
        f"trainer.total_training_steps={PPO_STEPS}",
        f"trainer.test_freq={PPO_STEPS}",
    )
    scores = curve(steps, "reward_model/score/mean")
    assert sum(scores[-3:]) / 3 > sum(scores[:3]) / 3 + 1.5
    before, *_, after = curve(steps, "val-core/arithmetic/reward/mean@1")
    assert after > before + 2, "on prompts that it has not seen"
    moved = curve(steps, "actor/reward_kl_penalty")  # nats per token, to the policy at the start
    assert 0.01 < max(moved) < 1.5
    assert curve(steps, "reward_model/failed") == [0.0] * PPO_STEPS
