"""Programs written from upstream's documented interface alone run here as they are: a recipe, an agent loop, a manager.

They lie in ``third_party``; nothing in them is of this library's own making.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.harness.programs import command, python
from tests.harness.runs import logged, prepare

pytestmark = pytest.mark.slow
THIRD_PARTY = Path(__file__).parent / "third_party"
WORDS = (
    "data.train_files=train.parquet",
    "data.val_files=train.parquet",
    "data.train_batch_size=4",
    "data.max_prompt_length=64",
    "actor_rollout_ref.model.path=model",
    "actor_rollout_ref.rollout.name=hf",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "algorithm.adv_estimator=grpo",
    "trainer.logger=[file]",
    "trainer.resume_mode=disable",
    "trainer.total_training_steps=2",
    "trainer.test_freq=1",
    "trainer.save_freq=-1",
    "trainer.device=cpu",
)


@pytest.fixture
def here(workplace):
    prepare(hidden=16, heads=2, kv_heads=1, layers=1)
    return workplace


def test_a_recipe_with_a_trainer_and_a_ray_task_of_its_own_trains(here):
    words = ["actor_rollout_ref.rollout.n=2", "data.max_response_length=8", "ray_kwargs.ray_init.num_cpus=2",
             "actor_rollout_ref.actor.use_kl_loss=true", "reward.custom_reward_function.path=scorer.py"]  # fmt: skip
    printed = python(str(THIRD_PARTY / "main_recipe.py"), *WORDS, *words).stdout
    assert json.loads(printed.splitlines()[-1]) == {"validations": 3}, "before training, and after each of two steps"
    found = logged("logs/mine")
    steps = [one for one in found if "actor/grad_norm" in one]
    assert len(steps) == 2 and all(one["actor/grad_norm"] > 0 and "actor/kl_loss" in one for one in steps)
    assert [one["val-aux/mine/validations"] for one in found if "val-aux/mine/validations" in one] == [1, 2, 3]


def test_an_agent_loop_and_a_reward_manager_of_users_train_together(here):
    (here / "agent.yaml").write_text((THIRD_PARTY / "agent.yaml").read_text())
    words = ["actor_rollout_ref.rollout.n=4", "data.max_response_length=40", "trainer.runtime=local",
             "actor_rollout_ref.rollout.agent.agent_loop_config_path=agent.yaml", "trainer.rollout_data_dir=dump",
             "actor_rollout_ref.rollout.agent.default_agent_loop=ask_twice", "trainer.project_name=mine",
             "reward.reward_manager.name=distinct", "+reward_model.reward_kwargs.penalty=0.001"]  # fmt: skip
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(THIRD_PARTY), str(Path.cwd())])
    named = {"PYTHONPATH": path, "VERL_USE_EXTERNAL_MODULES": "my_reward_manager"}
    command("verl.trainer.main_ppo", *WORDS, *words, **named)
    steps = [one for one in logged("logs/mine") if "actor/grad_norm" in one]
    assert len(steps) == 2 and all(one["num_turns/mean"] == 4 and one["actor/grad_norm"] > 0 for one in steps)
    for row in map(json.loads, (here / "dump/1.jsonl").read_text().splitlines()):
        assert row["score"] == pytest.approx(row["distinct"]) and row["score"] <= 1
