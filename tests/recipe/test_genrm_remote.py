"""A judge on a server as the reward: what it reads, what its grades become, and a run that learns from them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from recipe.genrm_remote.main_genrm_remote import GENRM, main
from recipe.genrm_remote.reward_function import compute_score
from recipe.genrm_remote.rule_judge import server
from tests.harness import judges
from tests.harness.configs import changed
from tests.harness.rows import addition_rows, write_prompts
from tests.harness.runs import logged
from tests.harness.servers import serving
from verl.config import load_config
from verl.errors import DataError
from verl.rewards.judges import JudgeError, shared_client

A, KWARGS = "actor_rollout_ref.actor", "+reward.custom_reward_function.reward_kwargs"
REQUIRED = ("data.train_files=train.jsonl", "data.train_batch_size=8", "data.max_prompt_length=64",
            "data.max_response_length=6", "actor_rollout_ref.model.path=model",
            f"{A}.ppo_mini_batch_size=4")  # fmt: skip
INFO = {"question": "6*7="}


@pytest.fixture(autouse=True)
def no_client_of_another_test() -> Iterator[None]:
    shared_client.cache_clear()
    yield
    shared_client.cache_clear()


@pytest.fixture
def judge() -> Iterator[str]:
    """The address of the recipe's judge by rule."""
    with server() as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{listening.server_address[1]}"
        listening.shutdown()
        thread.join()


def score(answer: str, info: dict | None = INFO, **arguments) -> dict[str, float]:
    return asyncio.run(compute_score("sums", answer, "42", info, **arguments))


def test_the_judge_reads_question_answer_and_ground_truth():
    def reply(payload: dict) -> tuple[int, dict]:
        assert "1. The final answer is 42." in judges.prompt(payload)
        assert judges.shown(payload, "question") == "6*7="
        return judges.reply(f"VERDICT: {9 if judges.shown(payload, 'answer') == 'It is 42.' else 2}")

    with serving({judges.PATH: reply}) as judge:
        right, wrong = (score(text, address=judge.url) for text in ("It is 42.", "It is 41."))
    assert (right["score"], right["acc"], right["judge_calls"]) == (0.9, 1.0, 1.0)
    assert (wrong["score"], wrong["acc"]) == (0.2, 0.0)


def test_the_items_of_a_rubric_are_weighed():
    def reply(payload: dict) -> tuple[int, dict]:
        return judges.reply(f"VERDICT: {10 if 'short' in judges.prompt(payload) else 4}")

    with serving({judges.PATH: reply}) as judge:
        graded = score("42", address=judge.url, rubric={"It is short.": 1, "It names {ground_truth}.": 3})
    assert graded["score"] == pytest.approx((1 * 1.0 + 3 * 0.4) / 4)


def test_prose_scores_nothing_and_a_judge_that_fails_gives_no_score():
    with serving({judges.PATH: [judges.reply("A fine answer."), (400, {"error": "no such model"})]}) as judge:
        assert score("42", address=judge.url)["score"] == 0
        with pytest.raises(JudgeError, match="no such model"):
            score("43", address=judge.url)


def test_a_row_without_a_question_is_named():
    with pytest.raises(DataError, match=r"extra_info\.question"):
        score("42", info={"index": 3}, address="http://127.0.0.1:9")


def test_the_judge_by_rule_grades_the_share_of_lower_case(judge: str):
    assert [score(text, address=judge)["score"] for text in ("abcd", "aB1c", "12", "a\nb")] == [
        1.0, 0.5, 0.0, pytest.approx(0.667, abs=1e-3),
    ]  # fmt: skip


def test_a_run_is_paid_by_the_judge(lower_case_task: Path, judge: str):
    rows = addition_rows(16)
    for row in rows:
        row["extra_info"]["question"] = row["prompt"][0]["content"]
    write_prompts("train.jsonl", rows)
    more = [f"{KWARGS}.address={judge}", "actor_rollout_ref.rollout.n=2", "trainer.total_training_steps=2",
            "trainer.logger=[file]", "trainer.resume_mode=disable", "trainer.experiment_name=judged"]  # fmt: skip
    assert main([*REQUIRED, *more]) == 0
    steps = logged("logs/verl-genrm-remote", "judged")
    assert len(steps) == 2 and all(0 < step["critic/score/mean"] < 1 for step in steps)
    assert not any(step.get("reward/unscorable") for step in steps)


def test_the_settings_are_accepted(lower_case_task: Path):
    config = load_config("ppo_trainer", changed(GENRM, *REQUIRED))
    assert Path(config.reward.custom_reward_function.path).is_file() and config.reward.while_sampling
