"""DAPO and AIME: the last answer line, normalised; plus or minus one; accuracy apart."""

from __future__ import annotations

import pytest

from verl.rewards.scorers.math_dapo import compute_score, normalize_final_answer


@pytest.mark.parametrize(
    ("text", "truth", "right", "pred"),
    [
        ("Answer: 42", "42", True, "42"),
        (r"answer: $\boxed{42}$", "42", True, "42"),
        ("Answer: 1,000", "1000", True, "1000"),
        ("Answer: x=7", "7", True, "7"),
        ("42", "42", False, "[INVALID]"),
        ("", "42", False, "[INVALID]"),
        ("Answer: 34.0", "34", False, "34.0"),
        ("Answer: 1\nno\nANSWER :\n 2", "2", True, "2"),  # any case, the last one, the next line too
        ("Answer: 5 dollars", "5", True, "5"),
        (r"Answer: \text{yes}", "yes", True, "yes"),
        (r"Answer: \frac12", r"\frac{1}{2}", True, r"\frac{1}{2}"),
        (r"Answer: \sqrt2", r"\sqrt{2}", True, r"\sqrt{2}"),
        (r"Answer: 30^\circ", "30", True, "30"),
        ("Answer: the sum is $12$ units", "12", True, "12"),
    ],
)
def test_the_last_answer_line_is_compared(text, truth, right, pred):
    assert compute_score(text, truth) == {"score": 1.0 if right else -1.0, "acc": right, "pred": pred}


def test_the_last_answer_line_counts_wherever_it_stands():
    assert compute_score("Answer: 42\n" + "x" * 3000, "42")["acc"]
    assert not compute_score("Answer: 42\n" + "x" * 3000 + "\nAnswer: 41\n" + "x" * 3000, "42")["acc"]


def test_strict_box_takes_the_last_box_as_it_stands():
    assert compute_score(r"so \boxed{42}", "42", strict_box_verify=True)["score"] == 1.0
    assert compute_score(r"so \boxed{4{2}}", "4{2}", strict_box_verify=True)["acc"]
    assert compute_score(r"so \boxed{42.}", "42", strict_box_verify=True)["score"] == -1.0
    assert compute_score(r"so \boxed{42", "42", strict_box_verify=True)["pred"] == "[INVALID]"
    early = r"\boxed{42}" + "x" * 1000
    assert compute_score(early, "42", strict_box_verify=True)["acc"]
    assert compute_score(early, "42", strict_box_verify=True, pause_tokens_index=[3, 50])["acc"]
    assert not compute_score(early + r"\boxed{41}", "42", strict_box_verify=True)["acc"]


def test_an_integer_ground_truth_is_compared_as_text():
    assert compute_score("Answer: 204", 204)["acc"] is True


def test_the_order_of_deletions_matters():
    assert normalize_final_answer("3cm") == "3" and normalize_final_answer("3centimeters") == "3centi"
