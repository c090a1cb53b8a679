"""A run that scores beside sampling has the numbers of one that scores afterwards, and says how much it overlapped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.harness.models import tiny_model_dir
from tests.harness.rows import write_prompts
from verl.config import load_config
from verl.trainer import build, main_ppo

SCORER = """
def compute_score(solution_str, ground_truth, extra_info):
    if extra_info["index"] == 3:
        raise ValueError("not this one")
    return {"score": len(set(solution_str)) / 7, "long": len(solution_str) > 5}
"""
SETTINGS = [
    "data.train_files=train.parquet",
    "data.val_files=train.parquet",
    "data.train_batch_size=4",
    "data.max_prompt_length=64",
    "data.max_response_length=8",
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.model.path=model",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "reward.custom_reward_function.path=scorer.py",
    "trainer.logger=[file]",
    "trainer.project_name=p",
    "trainer.total_training_steps=2",
    "trainer.test_freq=1",
    "trainer.resume_mode=disable",
]
ONLY_BESIDE = {"reward/scored_while_sampling"}


def steps_of(name: str, *settings: str) -> list[dict[str, float]]:
    """The metrics of each step of a run, without seconds and what follows from them."""
    config = load_config("ppo_trainer", [*SETTINGS, f"trainer.experiment_name={name}", *settings])
    main_ppo.run_ppo(config)
    (file,) = Path("logs").rglob(f"{name}.jsonl")
    steps = [json.loads(line)["data"] for line in file.read_text().splitlines()]
    timed = ("timing", "perf/", "memory")
    return [{k: v for k, v in step.items() if not any(word in k for word in timed)} for step in steps]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path / "logs"))
    tiny_model_dir("model")
    write_prompts("train.parquet", 8)
    Path("scorer.py").write_text(SCORER)
    return tmp_path


def test_a_run_that_scores_beside_sampling_has_the_same_numbers(here):
    late = steps_of("late")
    early = steps_of("early", "reward.while_sampling=true", "reward.max_per_minute=60000")
    assert [{k: v for k, v in step.items() if k not in ONLY_BESIDE} for step in early] == late
    assert any("critic/rewards/mean" in step for step in late), "there is something to compare"
    shares = [step[name] for step in early for name in ONLY_BESIDE if name in step]
    assert shares and all(0 <= share <= 1 for share in shares)


def test_a_reward_model_is_scored_after_sampling(here):
    settings = ["reward.while_sampling=true", "reward.reward_model.enable=true", "reward.reward_model.model_path=rm"]
    config = load_config("ppo_trainer", [*SETTINGS, *settings])
    assert not build.scores_while_sampling(config)
    assert build.scores_while_sampling(load_config("ppo_trainer", [*SETTINGS, "reward.while_sampling=true"]))
