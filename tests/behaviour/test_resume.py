"""A run that stops and goes on ends with the same bits as one that never stopped."""

from __future__ import annotations

import pytest

from tests.harness.configs import changed
from tests.harness.runs import COMMON, differing, prepare, saved_tensors
from verl.metrics import notices
from verl.trainer import main_ppo


def train(steps: int, folder: str, *changes: str) -> None:
    """PPO with a critic, KL in the reward and two epochs: everything that has a state is in use."""
    words = (
        "algorithm.adv_estimator=gae",
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.type=adaptive",
        "data.train_batch_size=2",
        "data.max_response_length=6",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=1",
        "actor_rollout_ref.actor.ppo_epochs=2",
        "actor_rollout_ref.actor.shuffle=true",
        "actor_rollout_ref.actor.optim.lr=1e-2",
        "actor_rollout_ref.actor.optim.lr_warmup_steps=3",
        "trainer.save_freq=2",
        "trainer.resume_mode=auto",
        f"trainer.total_training_steps={steps}",
        f"trainer.default_local_dir={folder}",
    )
    assert main_ppo.main(changed(COMMON, *words, *changes)) == 0


@pytest.fixture
def here(workplace):
    prepare(rows=6)
    return workplace


def test_stopping_after_two_steps_changes_no_bit_of_what_four_steps_give(here):
    train(4, "straight")
    train(2, "stopped")
    train(4, "stopped")
    assert notices()["trainer.resume_mode"].endswith("stopped/global_step_2")
    assert differing("straight/global_step_4", "stopped/global_step_4") == []
    assert len(saved_tensors("straight/global_step_4")) > 50
    one, other = ((here / run / "global_step_4/trainer.json").read_text() for run in ("straight", "stopped"))
    assert one == other, "step, data position, KL coefficient and random states of the controller"


def test_a_finished_run_says_that_there_is_nothing_to_do(here):
    train(2, "run")
    train(2, "run")
    assert "the run is complete" in notices()["trainer.total_training_steps"]
