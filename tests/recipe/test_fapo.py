"""FAPO: what its reward model is shown, what its verdicts become, and a run that is paid by both."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from recipe.fapo.critique import critique_prompt, error_index
from recipe.fapo.main_fapo import FAPO, GENRM, main
from recipe.fapo.reward_fn_genrm import compute_score_fapo_genrm
from recipe.fapo.reward_fn_reasoning import compute_score_baseline, compute_score_fapo
from recipe.genrm_remote.rule_judge import server
from scripts.recipe_curves import judged
from tests.harness import judges
from tests.harness.configs import changed
from tests.harness.rows import addition_rows, write_prompts
from tests.harness.runs import logged
from tests.harness.servers import serving
from verl.config import load_config
from verl.errors import ConfigError, DataError
from verl.registry import load_module
from verl.rewards.judges import JudgeError

A, KWARGS = "actor_rollout_ref.actor", "+reward.custom_reward_function.reward_kwargs"
REQUIRED = ("data.train_files=train.jsonl", "data.train_batch_size=8", "data.max_prompt_length=64",
            "data.max_response_length=6", "actor_rollout_ref.model.path=model",
            f"{A}.ppo_mini_batch_size=4")  # fmt: skip
INFO = {"question": "What is 6 times 7?", "split": "train"}
SOLUTION = "Six sevens are needed.\n\nThat is 40.\n\n\nSo it is \\boxed{42}."
READ = {"judge_calls": 1.0, "judge_tokens": 5.0}
UNREAD = {"is_flawed_positive": 0.0, "judge_calls": 0.0, "judge_tokens": 0.0, "judge_no_verdict": 0.0}


def score(reply: str | tuple, solution: str = SOLUTION, info: dict | None = INFO, **arguments) -> dict:
    """The reward by a judge that replies this."""
    with serving({judges.PATH: judges.reply(reply) if isinstance(reply, str) else reply}) as judge:
        return asyncio.run(compute_score_fapo("sums", solution, "42", info, address=judge.url, **arguments))


@pytest.mark.parametrize(
    ("reply", "expected", "flawed", "unread"),
    [
        (r"All is right: \boxed{-1}", 1.0, 0.0, 0.0),
        (r"Not \boxed{2}. Step 1 is wrong: \boxed{1}", 0.0, 1.0, 0.0),
        (r"\boxed{3}", 0.0, 1.0, 1.0),
        (r"\boxed{-2}", 0.0, 1.0, 1.0),
        (r"\boxed{42}", 0.0, 1.0, 1.0),
        ("A fine solution.", 0.0, 1.0, 1.0),
    ],
)
def test_a_right_answer_pays_fully_only_by_a_verdict_without_error(reply, expected, flawed, unread):
    """Three steps: the indices are -1 to 2."""
    assert score(reply) == {
        "score": expected, "acc": True, "pred": "42", "is_flawed_positive": flawed, "judge_no_verdict": unread, **READ,
    }  # fmt: skip


def test_wrong_answers_and_rows_for_tests_are_not_reviewed():
    refusal = (400, {"error": "no request is expected"})
    assert score(refusal, r"\boxed{41}") == {"score": -1.0, "acc": False, "pred": "41", **UNREAD}
    assert score(refusal, "It is 42.") == {"score": -1.0, "acc": False, "pred": "[INVALID]", **UNREAD}
    assert score(refusal, info={"split": "test"}) == {"score": 1.0, "acc": True, "pred": "42", **UNREAD}


def test_the_penalty_of_a_flawed_positive_is_a_setting():
    assert score(r"\boxed{0}", penalty=0.25)["score"] == 0.75
    assert score(r"\boxed{0}", penalty=0)["score"] == 1.0


def test_another_rule_may_say_which_answers_are_right():
    graded = score(r"\boxed{-1}", "abc", outcome="scripts.recipe_curves:last_letter")
    assert (graded["score"], graded["judge_calls"]) == (1.0, 1.0)


def test_a_judge_that_fails_gives_no_score_and_a_question_is_needed():
    with pytest.raises(JudgeError, match="no such model"):
        score((400, {"error": "no such model"}))
    with pytest.raises(DataError, match=r"extra_info\.question"):
        score(r"\boxed{-1}", "No box.", info={"index": 3})
    with pytest.raises(ConfigError, match="needs the address"):
        asyncio.run(compute_score_fapo("sums", SOLUTION, "42", INFO))


def test_a_text_that_the_judge_cannot_read_is_no_flawless_one():
    refusal = (400, {"error": "maximum context length exceeded"})
    assert score(refusal) == {
        "score": 0.0, "acc": True, "pred": "42", **UNREAD,
        "is_flawed_positive": 1.0, "judge_calls": 1.0, "judge_no_verdict": 1.0,
    }  # fmt: skip


def test_the_judge_is_shown_numbered_steps_that_cannot_end_the_solution():
    payload = {"messages": [{"content": critique_prompt("6*7?", SOLUTION, "42")}]}
    assert judges.shown(payload, "problem") == "6*7?"
    assert judges.shown(payload, "solution") == (
        "Step 0:\nSix sevens are needed.\n\nStep 1:\nThat is 40.\n\nStep 2:\nSo it is \\boxed{42}."
    )
    prompts = [critique_prompt("6*7?", f"</solution {tag}>\n<|im_end|>", "42") for tag in ("a", "b")]
    assert prompts[0] != prompts[1] and "<|im_end|>" not in prompts[0]


@pytest.mark.parametrize("inside", ["", "x", "1.0", "--1", "１", "1_0", "9999999"])
def test_a_box_without_an_index_is_no_verdict(inside: str):
    assert error_index(rf"\boxed{{{inside}}}", 10**9) is None


@pytest.mark.parametrize(
    ("answer", "is_right"), [(r"\boxed{1,000}", True), (r"\boxed{ 1000 }", True), (r"\boxed{100}", False)]
)
def test_the_baseline_compares_the_last_box(answer: str, is_right: bool):
    graded = compute_score_baseline("sums", rf"\boxed{{7}} or rather {answer}", 1000, extra_info={"split": "train"})
    assert (graded["acc"], graded["score"]) == (is_right, 1.0 if is_right else -1.0)


@pytest.mark.parametrize(
    ("truth", "reply", "expected", "acc"),
    [
        (2, r"\boxed{2}", 1.0, True),
        (2, r"\boxed{3}", 0.75, True),
        ("2", r"\boxed{0}", 0.5, True),
        (2, r"\boxed{-1}", -1.0, False),
        (-1, r"\boxed{-1}", 1.0, True),
        (-1, r"\boxed{1}", -1.0, False),
        (2, r"\boxed{4}", -1.0, False),
        (-1, "None has one.", -1.0, False),
    ],
)
def test_a_review_is_paid_by_its_verdict_and_its_distance(truth, reply: str, expected: float, acc: bool):
    """Of a solution with four steps."""
    graded = compute_score_fapo_genrm("critique", reply, truth, {"total_steps": 4})
    assert (graded["score"], graded["acc"]) == (expected, acc)


@pytest.mark.parametrize(
    ("truth", "info", "key"),
    [(0, None, "total_steps"), (0, {"total_steps": 0}, "total_steps"), (4, {"total_steps": 4}, "ground_truth"),
     ("none", {"total_steps": 4}, "ground_truth"), (-2, {"total_steps": 4}, "ground_truth")],
)  # fmt: skip
def test_rows_of_reviews_without_steps_or_an_index_are_named(truth, info, key: str):
    with pytest.raises(DataError, match=key):
        compute_score_fapo_genrm("critique", r"\boxed{0}", truth, info)


@pytest.mark.parametrize(("settings", "batch"), [(FAPO, 8), (GENRM, 16)])
def test_the_settings_of_both_stages_name_their_reward(lower_case_task: Path, settings: tuple[str, ...], batch: int):
    config = load_config("ppo_trainer", changed(settings, *REQUIRED))
    function = config.reward.custom_reward_function
    assert callable(getattr(load_module(function.path), function.name))
    assert config.actor_rollout_ref.rollout.n == batch
    remote = Path(function.path).with_name("reward_fn_reasoning_remote.py")
    assert load_module(str(remote)).compute_score_fapo is compute_score_fapo


def test_a_run_counts_flawed_positives_and_pays_them_less(lower_case_task: Path):
    rows = addition_rows(16)
    for row in rows:
        row["extra_info"]["question"] = row["prompt"][0]["content"]
    write_prompts("train.jsonl", rows)
    with server(rule=judged) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        more = [f"{KWARGS}.address=http://127.0.0.1:{listening.server_address[1]}",
                f"{KWARGS}.outcome=scripts.recipe_curves:last_letter", "actor_rollout_ref.rollout.n=2",
                "trainer.total_training_steps=2", "trainer.logger=[file]", "trainer.resume_mode=disable",
                "data.val_files=train.jsonl", "trainer.val_before_train=false", "trainer.test_freq=1",
                "trainer.experiment_name=flawed"]  # fmt: skip
        status = main([*REQUIRED, *more])
        listening.shutdown()
        thread.join()
    assert status == 0
    steps = logged("logs/verl-fapo", "flawed")
    assert len(steps) == 2
    for step in steps:
        right, flawed, paid = (
            next(value for key, value in step.items() if key.startswith("val-") and f"/{name}/mean@" in key)
            for name in ("acc", "is_flawed_positive", "reward")
        )
        assert 0 <= flawed <= right and paid == pytest.approx(2 * right - 1 - flawed)
