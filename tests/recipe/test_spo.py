"""SPO: values of prompts in numbers, draws by them, advantages in numpy, a run, and one from a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from recipe.spo.core import ITEM, PRIOR, VALUE, ByUncertainty, PromptValues, ValuedPrompts, single_stream
from recipe.spo.main_spo import SPO, main
from tests.harness.configs import changed
from tests.harness.models import tiny_tokenizer
from tests.harness.rows import addition_rows, columns, write_prompts
from tests.harness.runs import logged, train
from verl.errors import ConfigError, DataError
from verl.protocol import DataProto, declared_field
from verl.trainer.ppo.scoring import under_free_names

A = "actor_rollout_ref.actor"
REQUIRED = ("data.train_files=train.jsonl", "data.train_batch_size=8", "data.max_prompt_length=64",
            "data.max_response_length=6", "actor_rollout_ref.model.path=model", f"{A}.ppo_mini_batch_size=4",
            "reward.custom_reward_function.path=scorer.py")  # fmt: skip


def test_a_scorer_cannot_replace_a_value_or_the_number_of_its_prompt():
    assert [declared_field(name).name for name in (VALUE, ITEM)] == ["spo_value", "spo_item"]
    names = under_free_names({VALUE: [1.0], ITEM: [0]}, (), "scorer")
    assert list(names) == ["reward_spo_value", "reward_spo_item"]


def test_a_value_is_the_mean_of_a_beta_distribution_that_forgets():
    """Window 10: a, b = 2.5, 7.5; after a right answer 3.25, 6.75; after a wrong one 2.925, 7.075."""
    tracked = PromptValues([0.25, float("nan")], rho=0.9)
    assert tracked.values().tolist() == [0.25, 0.5]
    tracked.add(0, 1.0)
    assert tracked.values()[0] == pytest.approx(0.325)
    tracked.add(0, 0.0)
    assert tracked.values()[0] == pytest.approx(0.2925)
    tracked.add(1, 1.0)
    assert tracked.values()[1] == pytest.approx(1.9 / 2.8)


def test_in_the_long_run_a_value_rests_on_the_window():
    tracked = PromptValues([float("nan")], rho=0.875)
    for step in range(400):
        tracked.add(0, float(step % 4 == 0))
    assert tracked.a[0] + tracked.b[0] == pytest.approx(8.0)
    shares = [0.125 * 0.875**age * (((399 - age) % 4) == 0) for age in range(400)]
    assert tracked.values()[0] == pytest.approx(sum(shares), abs=1e-9)


def test_advantages_are_rewards_less_values_normalised_over_the_batch():
    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.5, 0.0], [float("nan"), 0.0]])
    mask = torch.tensor([[1, 1], [1, 0], [1, 1], [1, 1]])
    advantages, returns = single_stream(rewards, mask, columns(spo_value=[0.25, 0.75, 0.5, 0.9]))
    gains = np.array([0.75, -0.75, 0.0])
    expected = (gains - gains.mean()) / gains.std(ddof=1)
    np.testing.assert_allclose(advantages[:3, 0].numpy(), expected, rtol=1e-6)
    assert advantages[1, 1] == 0 and (advantages[3] == 0).all() and advantages is returns


def test_equal_gains_and_a_single_answer_teach_nothing():
    for rows in (1, 2):
        advantages, _ = single_stream(torch.ones(rows, 1), torch.ones(rows, 1), columns(spo_value=[0.5] * rows))
        assert advantages.tolist() == [[0.0]] * rows


def test_rows_without_values_say_what_is_missing():
    with pytest.raises(ConfigError, match="ValuedPrompts"):
        single_stream(torch.ones(1, 1), torch.ones(1, 1), {})


def sampler(values: list[float], size: int, floor: float = 0.05, seed: int = 0) -> ByUncertainty:
    data = SimpleNamespace(tracked=PromptValues(values, rho=0.9))
    config = SimpleNamespace(
        spo_floor=floor, train_batch_size=size, gen_batch_size=None, oversample_factor=1, seed=seed
    )
    return ByUncertainty(data, config)


def test_a_prompt_is_drawn_as_often_as_its_outcome_is_uncertain():
    """Weights sqrt(v (1 - v)) + 0.05 of 0, 0.5, 0.9: 0.05, 0.55, 0.35."""
    order, drawn = sampler([0.0, 0.5, 0.9], size=1), np.zeros(3)
    for epoch in range(4000):
        order.set_epoch(epoch)
        drawn[list(order)] += 1
    np.testing.assert_allclose(drawn / 4000, np.array([0.05, 0.55, 0.35]) / 0.95, atol=0.03)


def test_a_draw_has_no_prompt_twice_and_follows_from_seed_epoch_and_values():
    order, other = sampler([0.5] * 20, size=12), sampler([0.5] * 20, size=12, seed=1)
    first = list(order)
    assert len(order) == len(set(first)) == 12 and first == list(order) != list(other)
    order.set_epoch(1)
    assert list(order) != first


def step(items: list[int], scores: list[float], failed: list[bool] | None = None) -> DataProto:
    rewards = torch.tensor(scores)[:, None]
    more = {} if failed is None else {"unscorable": failed}
    tensors = {"token_level_scores": rewards, "response_mask": torch.ones(len(items), 1)}
    return DataProto.from_dict(tensors=tensors, non_tensors=columns(spo_item=items, **more))


def test_every_scored_answer_moves_the_value_of_its_prompt_and_no_other():
    order = sampler([0.25, 0.25, 0.25], size=1)
    order.update(step([2, 0, 2], [1.0, 1.0, 0.0], failed=[False, True, False]))
    assert order.tracked.values().tolist() == pytest.approx([0.25, 0.25, 0.2925])


def test_a_score_that_is_no_outcome_is_refused():
    with pytest.raises(DataError, match="from 0 to 1"):
        sampler([0.5], size=1).update(step([0], [1.5]))


def test_a_state_brings_the_values_back():
    order, other = sampler([0.25, 0.5], size=1), sampler([0.5, 0.5], size=1)
    order.update(step([0], [1.0]))
    other.load_state_dict(json.loads(json.dumps(order.state_dict())))
    assert other.tracked.values().tolist() == order.tracked.values().tolist()


def test_the_rows_of_a_dataset_have_their_present_values(workplace: Path):
    rows = [{**row, PRIOR: value} for row, value in zip(addition_rows(3), (0.25, None, 1.0))]
    config = SimpleNamespace(max_prompt_length=64, spo_rho=0.9)
    data = ValuedPrompts(write_prompts("rows.jsonl", rows), tiny_tokenizer(), config)
    assert [data[i][VALUE] for i in range(3)] == [0.25, 0.5, 1.0] and data[2][ITEM] == 2
    data.tracked.add(0, 1.0)
    assert data[0][VALUE] == pytest.approx(0.325)
    rows[1][PRIOR] = 1.5
    with pytest.raises(DataError, match=r"row 1.*prior_value"):
        ValuedPrompts(write_prompts("wrong.jsonl", rows), tiny_tokenizer(), config)


def test_a_run_reads_values_from_before_the_answer_and_updates_them(lower_case_task: Path):
    """With data.seed null the draw is that of trainer.seed."""
    seen = train(*changed(SPO, *REQUIRED, "trainer.total_training_steps=2", "trainer.seed=7"))
    first = seen.batches[0].non_tensor_batch
    draw = np.random.default_rng([7, 0]).choice(16, 8, replace=False, p=np.full(16, 1 / 16))
    assert set(first[ITEM].tolist()) == set(draw.tolist())
    assert [float(value) for value in first[VALUE]] == [0.5] * 8 and len(set(first[ITEM].tolist())) == 8
    tracked = seen.trainer.source.loader.sampler.tracked
    right, wrong = np.ones(16), np.ones(16)
    for batch in seen.batches:
        items, rewards = batch.non_tensor_batch[ITEM].astype(int), batch.batch["token_level_scores"].sum(-1).numpy()
        right[items] = 0.9 * right[items] + rewards
        wrong[items] = 0.9 * wrong[items] + 1 - rewards
    np.testing.assert_allclose(tracked.values(), right / (right + wrong), atol=1e-6)
    assert sum(len(batch) for batch in seen.batches) == 16 and (tracked.values() != 0.5).any()
    scores = seen.batches[0].batch["token_level_scores"].sum(-1).double().numpy()
    gains = scores - 0.5
    expected = (gains - gains.mean()) / (gains.std(ddof=1) + 1e-8)
    np.testing.assert_allclose(seen.batches[0].batch["advantages"][:, 0].numpy(), expected, atol=1e-5)


@pytest.mark.slow
def test_a_resumed_run_draws_scores_and_tracks_as_one_without_a_break(lower_case_task: Path):
    def learn(name: str, *more: str) -> tuple[list[tuple[list[int], list[float]]], PromptValues]:
        names = f"trainer.experiment_name={name}", f"trainer.default_local_dir={name}"
        seen = train(*changed(SPO, *REQUIRED, "trainer.total_training_steps=4", *names, *more))
        steps = [(batch.non_tensor_batch[ITEM].tolist(), batch.batch["token_level_scores"].sum(-1).tolist())
                 for batch in seen.batches]  # fmt: skip
        return steps, seen.trainer.source.loader.sampler.tracked

    complete, values = learn("one", "trainer.save_freq=2")
    rest, resumed = learn("two", "trainer.resume_mode=resume_path", "trainer.resume_from_path=one/global_step_2")
    assert len(complete) == 4 and rest == complete[2:]
    assert resumed.a.tolist() == values.a.tolist() and resumed.b.tolist() == values.b.tolist()
    assert (values.a != 1).sum() > 8, "the values tell runs from each other"


@pytest.mark.slow
def test_a_run_by_the_recipe_raises_the_reward(lower_case_task: Path):
    more = ["data.train_batch_size=16", f"{A}.optim.lr=3e-2", "trainer.total_training_steps=20",
            "trainer.logger=[file]",
            "trainer.resume_mode=disable", "trainer.experiment_name=spo"]  # fmt: skip
    assert main(changed(REQUIRED, *more)) == 0
    means = [line["critic/score/mean"] for line in logged("logs/verl-spo", "spo")]
    assert len(means) == 20 and sum(means[-3:]) / 3 > sum(means[:2]) / 2 + 0.3, means
