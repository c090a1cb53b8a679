"""GSM8K: the table of the specification, and all real answers against themselves and against the next one's."""

from __future__ import annotations

import json

import numpy as np
import pytest

from verl.errors import RewardError
from verl.rewards.scorers.gsm8k import compute_score, extract_solution


@pytest.mark.parametrize(
    ("tail", "strict", "flexible", "strict_lenient", "flexible_lenient"),
    [
        ("#### 1,234", "1234", "1,234", "1234", "1234"),
        ("#### 18.", "18.", "18.", "18", "18"),
        ("####5", None, "5", None, "5"),
        ("#### $18", None, "18", None, "18"),
        ("#### 10 #### 12", "12", "12", "12", "12"),
        ("#### -5", "-5", "-5", "-5", "-5"),
        ("#### 18 dollars", "18", "18", "18", "18"),
        ("no number.", None, None, None, None),
        ("", None, None, None, None),
        ("####  7", None, "7", None, "7"),  # exactly one space
        ("#### \uff11\uff18", None, None, None, None),  # full-width digits are none
        ("well, 5 apples, right.", None, ",", None, "5"),
    ],
)
def test_the_answer_is_read_as_the_table_says(tail, strict, flexible, strict_lenient, flexible_lenient):
    text = f"The reasoning ends here\n{tail}"
    assert extract_solution(text) == strict
    assert extract_solution(text, "flexible") == flexible
    assert extract_solution(text, "strict", lenient=True) == strict_lenient
    assert extract_solution(text, "flexible", lenient=True) == flexible_lenient


def test_a_trailing_full_stop_is_wrong_unless_lenient():
    assert compute_score("#### 18.", "18") == 0.0
    assert compute_score("#### 18.", "18", lenient=True) == 1.0
    assert compute_score("#### 18.0", "18", lenient=True) == 1.0
    assert compute_score("#### 18.5", "18", lenient=True) == 0.0
    assert compute_score("#### 18", "eighteen", lenient=True) == 0.0


def test_format_score_is_given_for_another_number_only():
    assert compute_score("#### 3", "4", format_score=0.1) == 0.1
    assert compute_score("3", "4", format_score=0.1) == 0.0
    assert compute_score("#### 4", "4", format_score=0.1, score=2.0) == 2.0


def test_the_last_mark_counts_wherever_it_stands():
    tail = " This follows from the steps above." * 200
    assert compute_score("#### 7" + tail, "7") == 1.0
    assert compute_score("#### 6\nno, wait\n#### -7" + tail, "-7") == 1.0
    assert compute_score("#### 7" + tail + "#### 6", "7") == 0.0
    assert compute_score("it is 7" + tail, "7", method="flexible") == 1.0
    assert extract_solution("9" * 400 + "1", "flexible") == "9" * 400 + "1"


@pytest.mark.parametrize("truth", [5, 5.0, "5", np.int64(5), np.float32(5.0), np.array(["5"]), [5]])
def test_a_ground_truth_of_any_type_is_compared_as_text(truth):
    assert compute_score("#### 5", truth) == 1.0
    assert compute_score("#### 6", truth) == 0.0


def test_an_unknown_method_is_refused():
    with pytest.raises(RewardError, match="strict, flexible"):
        compute_score("#### 5", "5", method="strct")


def test_every_real_answer_is_right_for_itself_and_wrong_for_the_next(shared):
    lines = (shared / "data" / "gsm8k" / "test.jsonl").read_text(encoding="utf-8").splitlines()
    answers = [json.loads(line)["answer"] for line in lines]
    truths = [answer.rpartition("#### ")[2].replace(",", "") for answer in answers]
    assert len(answers) == 1319
    assert sum(compute_score(a, t) for a, t in zip(answers, truths, strict=True)) == 1319
    wrong = [
        (answer, truth, other)
        for answer, truth, other in zip(answers, truths[1:] + truths[:1], truths, strict=True)
        if compute_score(answer, truth) != float(truth == other)
    ]
    assert wrong == []
