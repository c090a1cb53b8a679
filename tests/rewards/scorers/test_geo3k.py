r"""Geometry3K: nine tenths for the answer, one tenth for the form."""

from __future__ import annotations

import pytest

from verl.rewards.scorers.geo3k import compute_score, same_answer


@pytest.mark.parametrize(
    ("text", "score"),
    [
        (r"<think>a</think> \boxed{5}", 1.0),
        (r"\boxed{5}", 0.9),
        (r"<think>a</think> \boxed{6}", 0.1),
        (r"so 5", 0.0),
        (r"\boxed{5}, in the form \boxed{...}", 0.9),
        (r"\boxed{5}, in the form \boxed{ }", 0.9),
        (r" <think>a</think> \boxed{5}", 0.9),  # the whole text must have the form
        (r"<think>\boxed{5}</think>", 0.9),
        ("<think>a</think>\n\\boxed{5}\nmore", 1.0),
    ],
)
def test_accuracy_and_form_add_up(text, score):
    assert compute_score(text, "5") == pytest.approx(score)


def test_the_weights_and_the_box_can_be_chosen():
    assert compute_score("5", "5", use_boxed=False) == pytest.approx(0.9)
    assert compute_score(r"<think></think>\boxed{1}", "5", format_score=0.5) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("answer", "truth", "same"),
    [
        ("15.0", "15", True),
        ("2.50", "2.5", True),
        ("0.4", r"\frac { 2 } { 5 }", True),
        (r"10\sqrt{3}", r"10 \sqrt { 3 }", True),
        ("5 cm", "5", True),
        (r"5\text{ cm}", "5", True),
        (r"45^\circ", "45", True),
        ("1,234", "1234", True),
        ("7 3/4", "31/4", True),
        ("2/4", "1/2", False),  # a fraction must be reduced
        ("8/2", "4", False),
        ("(1, 2)", "(1,2.0)", True),
        ("(1,2)", "[1,2]", False),
        ("(1,2)", "(2,1)", False),
        ("1/0", "1", False),
        ("7 3/0", "7", False),
        ("", "5", False),
        ("9" * 500, "9" * 500, True),
        ("__import__('os').getcwd()", "5", False),
    ],
)
def test_answers_are_compared_as_strings_tuples_and_numbers(answer, truth, same):
    assert same_answer(answer, truth) is same


@pytest.mark.parametrize(
    ("answer", "truth", "right"),
    [
        (r"5\sqrt{3}", r"\sqrt{75}", True),
        (r"\frac{3\sqrt{2}}{2}", r"\frac{3}{\sqrt{2}}", True),
        (r"(1, \frac{\sqrt8}{2})", r"(1, \sqrt{2})", True),
        (r"\sqrt{4}", "2", False),
        (r"2x+2", "2(x+1)", True),
        (r"5\sqrt{3}", r"\sqrt{74}", False),
    ],
)
def test_formulas_are_compared_by_value_and_integers_as_they_are_written(answer, truth, right):
    assert same_answer(answer, truth) is right
