"""A tiny model that cannot multiply learns to call a calculator, and without the tool it does not learn to multiply."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.harness.programs import PROJECT, curve, fine_tuned, run, trained
from tests.harness.runs import records

pytestmark = pytest.mark.slow
EXAMPLE = PROJECT / "examples/calculator"
WARM_UP, STEPS = 150, 8
ACCURACY = "val-core/products/reward/mean@1"


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with prompts and a model that has seen the demonstrations, one in four of which makes a call."""
    folder = tmp_path_factory.mktemp("calculator")
    run([sys.executable, f"{EXAMPLE}/make.py", "."], cwd=folder)
    schedule = ("optim.lr=3e-3", "optim.lr_warmup_steps=10", "optim.lr_scheduler_type=cosine")
    sizes = ("data.train_batch_size=64", "data.max_length=40", "trainer.total_epochs=100")
    fine_tuned(folder, WARM_UP, "data.train_files=sft.parquet", *sizes, *schedule)
    return folder


def learn(folder: Path, name: str, *arguments: str) -> list[dict]:
    return trained(
        folder,
        name,
        "data.train_files=train.parquet",
        "data.val_files=test.parquet",
        "data.train_batch_size=32",
        "data.max_prompt_length=16",
        "data.max_response_length=32",
        f"actor_rollout_ref.model.path=sft/global_step_{WARM_UP}/model/huggingface",
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=32",
        "actor_rollout_ref.actor.optim.lr=5e-4",
        "algorithm.adv_estimator=grpo",
        f"reward.custom_reward_function.path={EXAMPLE}/reward.py",
        f"trainer.total_training_steps={STEPS}",
        f"trainer.test_freq={STEPS}",
        f"trainer.rollout_data_dir={name}/dump",
        f"trainer.validation_data_dir={name}/validation",
        *arguments,
    )


def test_a_model_learns_to_call_the_calculator_and_gains_what_it_could_not_learn_without(warm):
    with_tool = learn(
        warm,
        "tool",
        "actor_rollout_ref.rollout.multi_turn.enable=true",
        f"actor_rollout_ref.rollout.multi_turn.tool_config_path={EXAMPLE}/tools.yaml",
        "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=3",
    )
    before, after = curve(with_tool, ACCURACY)
    assert before <= 0.3, "the pupil mostly guesses"
    assert after >= 0.75
    rewards, calls = curve(with_tool, "critic/score/mean"), curve(with_tool, "tool_call_counts/mean")
    assert calls[0] < 0.6 and calls[-1] > 0.8, "it learns to call"
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1
    turns = curve(with_tool, "num_turns/mean")
    assert 2 <= turns[0] < turns[-1] and curve(with_tool, "val-aux/num_turns/mean")[-1] > 3.5

    without = learn(warm, "no_tool")
    assert curve(without, ACCURACY)[-1] < 0.2, "two layers do not learn to multiply from rewards"

    check_dumps(warm / "tool" / "dump" / "1.jsonl")
    check_dumps(warm / "tool" / "validation" / f"{STEPS}.jsonl")


def check_dumps(path: Path) -> None:
    """Every row holds its whole conversation; pieces, masks and counts agree."""
    rows = records(path)
    called = [row for row in rows if row["tool_call_counts"]]
    assert called, "some rows call the tool"
    for row in rows:
        pieces = [(piece["mask"], piece["tokens"]) for piece in row["trajectory"] if piece.get("tokens")]
        assert [tuple(stretch) for stretch in row["mask_runs"]] == pieces
        assert row["num_turns"] == 1 + len(pieces)
    answered = called[0]["trajectory"][1]
    assert answered["role"] == "tool" and answered["calls"][0]["name"] == "calculator"
    assert set(answered["calls"][0]) >= {"arguments", "answer", "reward", "seconds"}
