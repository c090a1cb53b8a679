"""A run that cannot learn says so, once, and a healthy one does not."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.harness.models import tiny_model_dir
from tests.harness.rows import turns, write_prompts
from tests.harness.runs import prepare, train
from tests.harness.scorers import LETTERS, scorer
from verl.errors import EngineError
from verl.metrics import notices
from verl.trainer import sft_trainer
from verl.trainer.ppo.signs import signs_of
from verl.trainer.watch import PATIENCE, Updates, Watch, signs_of_supervised

SIGNS = (
    "response_mask", "response_length/max", "response_length/clip_ratio", "critic/score",
    "training/zero_advantage_groups", "actor/lr", "actor/grad_norm", "actor/entropy",
    "loss_mask", "train/loss", "train/grad_norm", "train/lr",
)  # fmt: skip


@pytest.fixture(autouse=True)
def here(workplace):
    """Every test of this file."""


def told() -> dict[str, str]:
    return {name: text for name, text in notices().items() if name in SIGNS}


def run(scorer: str, *changes: str, **model) -> dict[str, str]:
    prepare(scorer, **model)
    train("trainer.total_training_steps=2", "actor_rollout_ref.rollout.ignore_eos=true", *changes)
    return told()


def test_equal_rewards_are_told_with_the_likely_cause_and_where_to_look():
    found = run(scorer("0.0"))
    assert set(found) == {"critic/score"}, "that nothing moves is a consequence, and not told beside it"
    text = found["critic/score"]
    assert text.startswith("for 2 steps in a row every sample scored 0, ")
    assert "verl.rewards.check" in text and "trainer.rollout_data_dir" in text


def test_equal_rewards_are_told_also_where_a_critic_learns_from_them():
    assert set(run(scorer("1.0"), "algorithm.adv_estimator=gae", "critic.model.path=model")) == {"critic/score"}


def test_groups_without_signal_are_told_where_the_batch_varies():
    """A reward that the prompt decides: every prompt's samples score the same."""
    assert set(run(scorer("float(ground_truth)"))) == {"training/zero_advantage_groups"}


def test_samples_that_are_all_cut_off_are_told():
    """Of the 259 tokens one ends an answer: none of the 8 that this seed draws."""
    few = ["data.train_batch_size=2", "actor_rollout_ref.rollout.n=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2"]
    found = run(LETTERS, *few, "actor_rollout_ref.rollout.ignore_eos=false", "data.max_response_length=1")
    assert "cut off" in found["response_length/clip_ratio"]


def test_a_learning_rate_of_zero_is_told():
    assert set(run(LETTERS, "actor_rollout_ref.actor.optim.lr=0")) == {"actor/lr"}


def test_a_healthy_run_is_told_nothing():
    assert run(LETTERS, "trainer.total_training_steps=6") == {}


def test_a_sign_is_told_when_it_has_held_for_some_steps_and_once():
    watch = Watch()
    for _ in range(PATIENCE - 1):
        watch.step({"critic/score": "it was so"})
    watch.step({})
    for _ in range(PATIENCE - 1):
        watch.step({"critic/score": "it was so"})
    watch.end()
    assert told() == {}, "it never held for long enough, and not for the whole run"
    watch.step({"critic/score": "it was so"})
    assert told() == {"critic/score": f"for {PATIENCE} steps in a row it was so"}


def test_one_step_is_no_run():
    watch = Watch()
    watch.step({"critic/score": "it was so"})
    watch.end()
    assert told() == {}


@pytest.mark.parametrize(
    ("metrics", "before", "tokens", "name"),
    [
        ({"train/loss": 0.0}, None, 0, "loss_mask"),
        ({"train/loss": float("nan")}, 1.0, 5, "train/loss"),
        ({"train/loss": float("inf")}, 1.0, 5, "train/loss"),
        ({"train/loss": 0.7}, 0.7, 5, "train/loss"),
        ({"train/loss": 0.7, "train/grad_norm": 0.0}, 0.8, 5, "train/grad_norm"),
        ({"train/loss": 0.7, "train/grad_norm": 1.0, "train/lr": 0.0}, 0.8, 5, "train/lr"),
        ({"train/loss": 0.7, "train/grad_norm": 1.0, "train/lr": 1e-5}, 0.8, 5, None),
        ({"train/loss": 0.7}, None, 5, None),
    ],
)
def test_signs_of_supervised_training(metrics, before, tokens, name):
    assert list(signs_of_supervised(metrics, before, tokens)) == ([name] if name else [])


def test_collapse_and_samples_that_are_all_masked_are_told():
    """The batch of a real step, changed."""
    prepare()
    seen = train("actor_rollout_ref.rollout.ignore_eos=true")
    batch, ctx = seen.batches[0], seen.trainer.ctx
    assert signs_of(batch, ctx) == {}
    ctx.metrics.add("actor/entropy", 1e-5, "min")
    assert set(signs_of(batch, ctx)) == {"actor/entropy"}
    width = batch.tensors["responses"].shape[1]
    batch.tensors["attention_mask"][:, -width + 1 :] = 0
    assert set(signs_of(batch, ctx)) == {"actor/entropy", "response_length/max"}
    batch.tensors["response_mask"] = torch.zeros_like(batch.tensors["response_mask"])
    assert set(signs_of(batch, ctx)) == {"response_mask"}


def test_supervised_training_that_repeats_its_loss_says_so():
    tiny_model_dir("model")
    write_prompts("train.jsonl", [{"messages": turns("a", "b")}] * 8)
    words = ["data.train_files=train.jsonl", "data.train_batch_size=4", "data.max_length=64", "model.path=model",
             "optim.lr=0", "trainer.total_training_steps=2", "trainer.logger=[file]"]  # fmt: skip
    assert sft_trainer.main(words) == 0
    assert set(told()) == {"train/lr"}


TAKEN, NOT_FINITE, EMPTY, OVERFLOW = (
    {"skipped_nonfinite_step": one, "skipped_empty_step": two, "skipped_overflow_step": three, "lr": 1.0}
    for one, two, three in [(0.0, 0.0, 0.0), (2.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)]
)


@pytest.mark.parametrize(
    "steps",
    [[], [TAKEN], [NOT_FINITE, TAKEN, NOT_FINITE], [EMPTY, EMPTY], [OVERFLOW], [{"lr": 1.0}]],
)
def test_one_step_that_was_taken_or_none_that_failed_is_no_error(steps):
    updates = Updates()
    for metrics in steps:
        updates.add("actor", metrics)
    updates.check()


def test_a_hundred_steps_in_a_row_that_are_not_finite_end_the_run():
    updates = Updates()
    for metrics in [*[NOT_FINITE] * 99, TAKEN, *[NOT_FINITE] * 99]:
        updates.add("actor", metrics)
        updates.add("critic", TAKEN)
    with pytest.raises(EngineError, match="the last 100 optimizer steps of the actor were skipped"):
        updates.add("actor", NOT_FINITE)


def test_a_model_that_took_no_step_is_named_whatever_the_others_did():
    updates = Updates()
    for model, metrics in (("actor", TAKEN), ("critic", NOT_FINITE), ("critic", EMPTY), ("critic", NOT_FINITE)):
        updates.add(model, metrics)
    with pytest.raises(EngineError, match="all optimizer steps of the critic were skipped, 2 of them"):
        updates.check()


def test_supervised_training_that_took_no_step_ends_with_an_error(capfd):
    tiny_model_dir("model")
    path = "model/model.safetensors"
    weights = load_file(path)
    save_file({name: torch.full_like(weight, torch.nan) for name, weight in weights.items()}, path, {"format": "pt"})
    write_prompts("train.jsonl", [{"messages": turns("a", "b")}] * 4)
    words = ["data.train_files=train.jsonl", "data.train_batch_size=2", "data.max_length=64", "model.path=model",
             "trainer.total_training_steps=2", "trainer.default_local_dir=sft", "trainer.logger=[file]"]  # fmt: skip
    assert sft_trainer.main(words) == 2
    assert "nothing was trained: all optimizer steps of the model were skipped, 2 of them" in capfd.readouterr().err
