"""A run that stops and goes on ends with the same bits as one that never stopped."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.harness.models import tiny_model_dir
from tests.harness.rows import write_prompts
from verl.metrics import notices, reset_notices
from verl.trainer import main_ppo

SCORER = """def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return len(set(solution_str)) / 10
"""


def train(steps: int, folder: str, *changes: str) -> None:
    """PPO with a critic, KL in the reward and two epochs: everything that has a state is in use."""
    status = main_ppo.main(
        [
            "algorithm.adv_estimator=gae",
            "algorithm.use_kl_in_reward=true",
            "algorithm.kl_ctrl.type=adaptive",
            "data.train_files=train.parquet",
            "data.train_batch_size=2",
            "data.max_prompt_length=64",
            "data.max_response_length=6",
            "actor_rollout_ref.model.path=model",
            "actor_rollout_ref.rollout.n=2",
            "actor_rollout_ref.actor.ppo_mini_batch_size=1",
            "actor_rollout_ref.actor.ppo_epochs=2",
            "actor_rollout_ref.actor.shuffle=true",
            "actor_rollout_ref.actor.optim.lr=1e-2",
            "actor_rollout_ref.actor.optim.lr_warmup_steps=3",
            "reward.custom_reward_function.path=scorer.py",
            "trainer.save_freq=2",
            f"trainer.total_training_steps={steps}",
            f"trainer.default_local_dir={folder}",
            "trainer.logger=[file]",
            *changes,
        ]
    )
    assert status == 0


def tensors(folder: Path) -> dict:
    """All tensors of a checkpoint by file and name."""
    files = sorted(folder.rglob("*.safetensors"))
    return {(str(f.relative_to(folder)), name): t for f in files for name, t in load_file(f).items()}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    reset_notices()
    tiny_model_dir("model")
    write_prompts("train.parquet", 6)
    Path("scorer.py").write_text(SCORER)
    return tmp_path


def test_stopping_after_two_steps_changes_no_bit_of_what_four_steps_give(here):
    train(4, "straight")
    train(2, "stopped")
    train(4, "stopped")
    assert notices()["trainer.resume_mode"].endswith("stopped/global_step_2")
    whole, resumed = tensors(here / "straight/global_step_4"), tensors(here / "stopped/global_step_4")
    assert whole.keys() == resumed.keys()
    assert len(whole) > 50
    different = [key for key in whole if not whole[key].equal(resumed[key])]
    assert different == []
    one, other = ((here / run / "global_step_4/trainer.json").read_text() for run in ("straight", "stopped"))
    assert one == other, "step, data position, KL coefficient and random states of the controller"


def test_a_finished_run_says_that_there_is_nothing_to_do(here):
    train(2, "run")
    train(2, "run")
    assert "the run is complete" in notices()["trainer.total_training_steps"]
