"""Whole RL runs in this process on a tiny model, of which the tests read what the file logger wrote."""

from __future__ import annotations

import json
from pathlib import Path

from verl.config import load_config
from verl.trainer import main_ppo

SCORER = (
    "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return len(solution_str) % 5\n"
)
COMMON = (
    "algorithm.adv_estimator=grpo",
    "data.train_files=train.parquet",
    "data.train_batch_size=2",
    "data.max_prompt_length=64",
    "data.max_response_length=6",
    "actor_rollout_ref.model.path=model",
    "actor_rollout_ref.rollout.n=4",
    "reward.custom_reward_function.path=scorer.py",
    "trainer.logger=[file]",
    "trainer.project_name=logged",
)


def logged_steps(name: str, *settings: str) -> list[dict]:
    """What each step of a run logged, in a folder with ``model``, ``train.parquet`` and ``scorer.py``.

    Args:
        name: of the run; its checkpoints lie in a folder of this name, and its metrics in ``logs``, where
            VERL_FILE_LOGGER_ROOT points to.
    """
    own = (f"trainer.experiment_name={name}", f"trainer.default_local_dir={name}")
    main_ppo.run_ppo(load_config("ppo_trainer", [*COMMON, *own, *settings]))
    lines = Path(f"logs/logged/{name}.jsonl").read_text().splitlines()
    return [json.loads(line)["data"] for line in lines]
