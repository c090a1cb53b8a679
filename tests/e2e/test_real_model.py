"""A real pretrained Llama (260k parameters, TinyStories) trains on a custom reward and on real GSM8K rows."""

from __future__ import annotations

import sys

import pytest

from tests.harness.programs import PROJECT, curve, run, trained
from tests.harness.rows import write_prompts

pytestmark = pytest.mark.slow

WORD_REWARD = '''"""Rewards stories with the word "she" in them, the brief's first form of a reward function."""


def compute_reward(responses, ground_truths):
    return [float(truth in response.lower().split()) for response, truth in zip(responses, ground_truths)]
'''


def test_twenty_grpo_steps_teach_tinystories_a_chosen_word(shared, tmp_path):
    openings = ["Once upon a time", "One day", "There was a little", "In the park", "A small dog", "The sun was"]
    rows = [
        {"prompt": [{"role": "user", "content": openings[i % 6]}], "reward_model": {"ground_truth": "she"}}
        for i in range(96)
    ]
    write_prompts(tmp_path / "train.parquet", rows)
    (tmp_path / "word.py").write_text(WORD_REWARD)
    steps = trained(
        tmp_path,
        "word",
        "algorithm.adv_estimator=grpo",
        "data.train_files=train.parquet",
        "data.train_batch_size=16",
        "data.max_prompt_length=64",
        "data.max_response_length=24",
        f"actor_rollout_ref.model.path={shared}/models/tinystories-260k",
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.optim.lr=2e-3",
        "custom_reward_function.path=word.py",
        "trainer.total_training_steps=20",
    )
    rewards = curve(steps, "critic/score/mean")
    assert rewards[0] < 0.4
    assert sum(rewards[-3:]) / 3 > 0.5


def test_real_gsm8k_rows_train_without_error(shared, tmp_path):
    write = [sys.executable, f"{PROJECT}/examples/data_preprocess/gsm8k.py", "--local_save_dir", "gsm8k"]
    run([*write, "--local_dataset_path", f"{shared}/data/gsm8k"], cwd=tmp_path)
    steps = trained(
        tmp_path,
        "gsm8k",
        "algorithm.adv_estimator=grpo",
        "data.train_files=gsm8k/train.parquet",
        "data.train_max_samples=64",
        "data.train_batch_size=4",
        "data.max_prompt_length=384",
        "data.truncation=left",
        "data.max_response_length=32",
        f"actor_rollout_ref.model.path={shared}/models/tinystories-260k",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "trainer.total_training_steps=2",
    )
    assert [step["step"] for step in steps] == [1, 2]
    assert curve(steps, "reward/unscorable") == [0.0, 0.0], "the built-in GSM8K scorer scored every answer"
