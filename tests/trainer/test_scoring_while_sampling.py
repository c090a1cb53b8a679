"""A run that scores beside sampling has the numbers of one that scores afterwards, and says how much it overlapped."""

from __future__ import annotations

import pytest

from tests.harness.runs import COMMON, logged_steps, prepare
from verl.config import load_config
from verl.trainer import build

SCORER = """
def compute_score(solution_str, ground_truth, extra_info):
    if extra_info["index"] == 3:
        raise ValueError("not this one")
    return {"score": len(set(solution_str)) / 7, "long": len(solution_str) > 5}
"""
SETTINGS = ("data.val_files=train.parquet", "trainer.total_training_steps=2", "trainer.test_freq=1")
ONLY_BESIDE = {"reward/scored_while_sampling"}


def steps_of(name: str, *settings: str) -> list[dict[str, float]]:
    """The metrics of each step of a run, without seconds and what follows from them."""
    timed = ("timing", "perf/", "memory")
    steps = logged_steps(name, *SETTINGS, *settings)
    return [{k: v for k, v in step.items() if not any(word in k for word in timed)} for step in steps]


@pytest.fixture
def here(workplace):
    prepare(SCORER)
    return workplace


def test_a_run_that_scores_beside_sampling_has_the_same_numbers(here):
    late = steps_of("late")
    early = steps_of("early", "reward.while_sampling=true", "reward.max_rpm=60000")
    assert [{k: v for k, v in step.items() if k not in ONLY_BESIDE} for step in early] == late
    assert any("critic/rewards/mean" in step for step in late), "there is something to compare"
    shares = [step[name] for step in early for name in ONLY_BESIDE if name in step]
    assert shares and all(0 <= share <= 1 for share in shares)


def test_a_reward_model_is_scored_after_sampling(here):
    settings = ["reward.while_sampling=true", "reward.reward_model.enable=true", "reward.reward_model.model_path=rm"]
    config = load_config("ppo_trainer", [*COMMON, *SETTINGS, *settings])
    assert not build.scores_while_sampling(config)
    assert build.scores_while_sampling(load_config("ppo_trainer", [*COMMON, *SETTINGS, "reward.while_sampling=true"]))
