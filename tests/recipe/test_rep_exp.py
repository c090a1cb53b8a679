"""Exploration by representations: the bonus as a ridge regression's, the hidden states of transformers, a run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModel

from recipe.rep_exp.core import BONUS, explored, leverages, paid_bonus, random_projection
from recipe.rep_exp.main_rep_exp import REP_EXP, main
from recipe.rep_exp.states import STATES, StatesEngine, with_states_of_tokens
from tests.harness.configs import changed
from tests.harness.engines import model_dir, ragged_batch
from tests.harness.runs import logged, train
from verl.config import FSDPEngineConfig, HFModelConfig, load_config
from verl.errors import ConfigError, EngineError
from verl.protocol import DataProto

A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
REQUIRED = ("data.train_files=train.jsonl", "data.train_batch_size=8", "data.max_prompt_length=64",
            "data.max_response_length=6", "actor_rollout_ref.model.path=model", f"{A}.ppo_mini_batch_size=4",
            "reward.custom_reward_function.path=scorer.py", f"{R}.n=4")  # fmt: skip
ALL = torch.ones(4, dtype=torch.bool)


@pytest.mark.parametrize("numbers", [2, 3, 40])
def test_the_bonus_is_the_distance_by_the_covariance_of_the_group(numbers):
    """Written out with the matrix of the paper, for fewer and for more numbers than answers."""
    draw = np.random.default_rng(numbers)
    rows, index, counted = draw.normal(size=(9, numbers)), list("abababbab"), np.ones(9, dtype=bool)
    counted[4] = False
    bonus = leverages(torch.tensor(rows), index, torch.tensor(counted), ridge=0.3)
    for i in range(9):
        others = [j for j in range(9) if index[j] == index[i] and counted[j]]
        centred = rows[others] - rows[others].mean(0)
        matrix = 0.3 * np.eye(numbers) + sum(np.outer(row, row) for row in centred)
        row = rows[i] - rows[others].mean(0)
        expected = row @ np.linalg.inv(matrix) @ row if counted[i] else 0.0
        assert bonus[i].item() == pytest.approx(expected, rel=1e-9)


def test_an_answer_unlike_three_equal_ones_earns_most():
    """Centred: 3 and three times -1 in one direction, 12 in all; 9 / 12.5 and 1 / 12.5 with lambda 1/2."""
    bonus = leverages(torch.tensor([[4.0], [0.0], [0.0], [0.0]]), ["a"] * 4, ALL, ridge=0.5)
    assert bonus.tolist() == pytest.approx([9 / 12.5, 1 / 12.5, 1 / 12.5, 1 / 12.5])


def test_equal_answers_and_one_alone_earn_nothing():
    assert leverages(torch.ones(4, 3), ["a", "a", "a", "b"], ALL, ridge=0.01).tolist() == [0.0] * 4


def test_without_a_right_answer_to_the_prompt_no_bonus_is_paid():
    """The right answer of prompt c has no score, so it does not count."""
    bonus, counted = torch.tensor([0.5, 0.25, 0.75, 0.125, 0.5]), torch.tensor([True, True, True, False, True])
    right = torch.tensor([True, False, False, True, False])
    assert paid_bonus(bonus, right, list("aabcc"), counted).tolist() == [0.5, 0.25, 0.0, 0.0, 0.0]


def test_a_projection_keeps_lengths_in_the_mean_and_is_sparse():
    row = torch.linspace(-1, 2, 100, dtype=torch.float64)
    squares = [(row @ random_projection(100, 20, [seed])).square().sum().item() for seed in range(400)]
    assert np.mean(squares) == pytest.approx(row.square().sum().item(), rel=0.05)
    drawn = random_projection(100, 20, [1, 2])
    assert drawn.shape == (100, 20) and drawn.abs().unique().tolist() == pytest.approx([0.0, np.sqrt(10 / 20)])
    assert 0.05 < (drawn != 0).double().mean() < 0.15 and (drawn != random_projection(100, 20, [1, 3])).any()


def test_the_reward_with_the_bonus_is_compared_in_the_group():
    scores, bonus = np.array([1.0, 0.0, 0.0, np.nan]), np.array([0.2, 0.8, 0.0, 0.0])
    rewards, mask = torch.zeros(4, 3), torch.tensor([[1, 1, 1], [1, 0, 0], [0, 1, 1], [1, 1, 1]])
    rewards[:, 0] = torch.tensor(scores)
    config = SimpleNamespace(rep_exp_beta=0.5)
    advantages, returns = explored(rewards, mask, ["a"] * 4, torch.tensor(bonus).float(), config)
    total = (scores + 0.5 * bonus)[:3]
    expected = (total - total.mean()) / (total.std(ddof=1) + 1e-6)
    np.testing.assert_allclose(advantages[[0, 1, 2], [0, 0, 1]].numpy(), expected, rtol=1e-5)
    assert (advantages[mask == 0] == 0).all() and (advantages[3] == 0).all() and advantages is returns


@pytest.mark.parametrize("limits", [{}, {"micro_batch_size": 2}, {"max_tokens": 30}])
def test_states_are_those_of_transformers_after_each_trained_token(tmp_path, limits):
    """Rows with padding on both sides, with a tool's tokens inside, and one that is trained on nowhere."""
    path, batch = model_dir(tmp_path), ragged_batch()
    engine = StatesEngine(HFModelConfig(path=str(path)), FSDPEngineConfig(), kind="value")
    means = engine.infer(with_states_of_tokens(batch), (STATES,), **limits)[STATES]
    tensors = batch.batch
    inputs = {name: tensors[name] for name in ("input_ids", "attention_mask", "position_ids")}
    with torch.no_grad():
        states = AutoModel.from_pretrained(path).eval()(**inputs).last_hidden_state[:, tensors["prompts"].shape[1] :]
    for row, mask in enumerate(tensors["response_mask"].bool()):
        expected = states[row][mask].mean(0) if mask.any() else torch.zeros(states.shape[-1])
        torch.testing.assert_close(means[row], expected, atol=1e-5, rtol=1e-4)


def test_an_engine_of_states_has_no_log_probs(tmp_path):
    engine = StatesEngine(HFModelConfig(path=str(model_dir(tmp_path))), FSDPEngineConfig(), kind="value")
    with pytest.raises(EngineError, match=STATES):
        engine.infer(ragged_batch(), ("log_probs",))


def test_an_estimator_of_a_longer_name_is_not_the_recipes(workplace: Path):
    with pytest.raises(ConfigError, match="paid by an estimator"):
        load_config(
            "ppo_trainer", changed(REP_EXP, *REQUIRED, "algorithm.adv_estimator=recipe.rep_exp.core:unexplored")
        )


def group_of(batch: DataProto, uid: str) -> np.ndarray:
    return np.flatnonzero(batch.non_tensor_batch["uid"] == uid)


def test_a_run_pays_the_bonus_of_the_initial_models_states(lower_case_task: Path):
    """From the model's folder: states, projection, matrix and advantages of the second step."""
    words = ["trainer.total_training_steps=2", "algorithm.rep_exp_beta=2", "trainer.seed=7", f"{A}.optim.lr=1e-2"]
    seen = train(*changed(REP_EXP, *REQUIRED, *words))
    batch = seen.batches[1]
    tensors, number = batch.batch, batch.batch["responses"].shape[1]
    inputs = {name: tensors[name] for name in ("input_ids", "attention_mask", "position_ids")}
    with torch.no_grad():
        states = AutoModel.from_pretrained("model").eval()(**inputs).last_hidden_state[:, -number:].double()
    mask = tensors["response_mask"].double()
    means = (states * mask[..., None]).sum(1) / mask.sum(-1, keepdim=True)
    rows = (means @ random_projection(16, 32, [7, 2])).numpy()
    scores = tensors["token_level_scores"].double().sum(-1).numpy()
    with_right = 0
    for uid in set(batch.non_tensor_batch["uid"]):
        group = group_of(batch, uid)
        centred = rows[group] - rows[group].mean(0)
        inverse = np.linalg.inv(0.01 * np.eye(32) + centred.T @ centred)
        bonus = np.einsum("id,de,ie->i", centred, inverse, centred) * (scores[group] > 0).any()
        np.testing.assert_allclose(tensors[BONUS][group].numpy(), bonus, atol=1e-4)
        total = scores[group] + 2 * bonus
        expected = (total - total.mean()) / (total.std(ddof=1) + 1e-6)
        np.testing.assert_allclose(tensors["advantages"][group, 0].numpy(), expected, atol=1e-3)
        with_right += len(group) * bool((scores[group] > 0).any())
    assert with_right > 0 and seen.metrics[1]["rep_exp/paid"] == pytest.approx(with_right / len(batch))
    assert 0 < seen.metrics[1]["rep_exp/bonus"] < 1


def test_without_a_weight_the_run_is_that_of_grpo(lower_case_task: Path):
    more = ["trainer.total_training_steps=2", f"{A}.optim.lr=1e-2"]
    plain = changed(REP_EXP, *REQUIRED, *more, "algorithm.adv_estimator=grpo", "trainer.v1.trainer_mode=sync")
    explores = changed(REP_EXP, *REQUIRED, *more, "algorithm.rep_exp_beta=0")
    ours, theirs = (train(*words).batches[1].batch["responses"].tolist() for words in (explores, plain))
    assert ours == theirs


@pytest.mark.slow
def test_a_run_by_the_recipe_raises_the_reward(lower_case_task: Path):
    more = [f"{A}.optim.lr=3e-2", "trainer.logger=[file]", "trainer.resume_mode=disable",
            "trainer.total_training_steps=12", "trainer.experiment_name=explored"]  # fmt: skip
    assert main([*REQUIRED, *more]) == 0
    means = [step["critic/score/mean"] for step in logged("logs/verl-rep-exp", "explored")]
    assert len(means) == 12 and sum(means[-3:]) / 3 > sum(means[:2]) / 2 + 0.3, means
