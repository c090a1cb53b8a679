"""An agent that compacts its context learns: what it did before a compaction shares the score of what came after."""

from __future__ import annotations

import pytest

from tests.harness import programs
from tests.harness.compaction import WORDS, write_loops
from tests.harness.models import tiny_model_dir
from tests.harness.rows import write_prompts

SETTINGS = [
    "data.train_files=train.parquet",
    "data.train_batch_size=4",
    "data.max_prompt_length=64",
    "data.max_response_length=8",
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.model.path=model",
    "actor_rollout_ref.rollout.n=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.actor.ppo_epochs=2",
    "actor_rollout_ref.actor.optim.lr=0.03",
    "trainer.logger=[file]",
    "trainer.project_name=compaction",
    "trainer.experiment_name=e",
    "trainer.total_training_steps=12",
    "trainer.total_epochs=9",
    "trainer.resume_mode=disable",
    *WORDS,
]
SCHEDULES = {
    "sync": (),
    "queued_on_ray": ("trainer.v1.trainer_mode=colocate_async", "trainer.runtime=ray", "trainer.device=cpu",
                      "trainer.n_gpus_per_node=2"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_agent_that_compacts_its_context_learns(tmp_path, schedule):
    tiny_model_dir(tmp_path / "model")
    write_prompts(tmp_path / "train.parquet", 8)
    write_loops(tmp_path)
    programs.command("verl.trainer.main_ppo", *SETTINGS, *SCHEDULES[schedule], cwd=tmp_path)
    steps = programs.metrics(tmp_path, "compaction", "e")
    rewards = programs.curve(steps, "critic/score/mean")
    assert rewards[0] < 0.5 and max(rewards[-3:]) > 0.9, rewards
    assert any(step.get("training/trajectories_per_sample/mean", 1.0) > 1.0 for step in steps)
