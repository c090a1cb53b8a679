"""A student reaches its teacher with a third of the samples that the teacher's own training took."""

from __future__ import annotations

import pytest

from tests.harness.programs import curve, trained

pytestmark = pytest.mark.slow
ACCURACY = "val-core/arithmetic/reward/mean@1"
LOSS = "distillation.distillation_loss"


def learn(arithmetic, name: str, steps: int, *arguments: str) -> list[dict]:
    ends = (f"trainer.total_training_steps={steps}", f"trainer.test_freq={steps}", f"trainer.save_freq={steps}")
    words = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.checkpoint.save_contents=[model]")
    return trained(arithmetic.folder, name, *arithmetic.arguments, *ends, *words, *arguments)


def test_a_student_reaches_its_teacher_with_a_third_of_the_samples(arithmetic):
    of_teacher = learn(arithmetic, "teacher", 12)
    folder = arithmetic.folder / "teacher/global_step_12/actor/huggingface"
    steps = learn(
        arithmetic,
        "student",
        4,
        "distillation.enabled=true",
        f"distillation.teacher_models.teacher_model.model_path={folder}",
        f"{LOSS}.loss_mode=forward_kl_topk",
        f"{LOSS}.topk=16",
        f"{LOSS}.use_task_rewards=false",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",
    )
    before, *_, after = curve(steps, ACCURACY)
    losses = curve(steps, "distillation/loss")
    assert after >= 0.95 * curve(of_teacher, ACCURACY)[-1] > before
    assert losses[-1] <= 0.2 * losses[0], "the first step's loss is a mean over four updates, and has fallen within"
