"""Helpers that reward files import from upstream's scorers, and files that are written with them."""

from __future__ import annotations

import pytest

from verl.utils.reward_score import (
    geo3k,
    gsm8k,
    math_batch,
    math_dapo,
    math_reward,
    openr1mm,
    prime_math,
    search_r1_like_qa_em,
    tinyllava_video_r1,
)
from verl.utils.reward_score.prime_code.testing_util import run_test


@pytest.mark.parametrize(
    ("text", "boxed", "inside"),
    [
        (r"so \boxed{1}, no: \boxed{\frac{1}{2}}.", r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"old \fbox{7}", r"\fbox{7}", "7"),
        (r"$\boxed 5$ it is", r"\boxed 5", "5"),
        (r"open \boxed{1", None, None),
        ("none", None, None),
    ],
)
def test_the_last_box_is_found_with_its_command_and_opened(text, boxed, inside):
    assert math_reward.last_boxed_only_string(text) == boxed
    assert boxed is None or math_reward.remove_boxed(boxed) == inside


def test_what_is_no_box_cannot_be_opened():
    with pytest.raises(AssertionError, match="not of the form"):
        math_reward.remove_boxed("7")


def test_answers_are_compared_after_layout():
    assert math_reward.is_equiv(r"\tfrac12", r"\frac{1}{2}", verbose=True) and not math_reward.is_equiv("1", "2")
    assert math_reward.strip_string(r" 0.5") == r"\frac{1}{2}"


def test_dapos_helpers_know_braces_only():
    assert math_dapo.last_boxed_only_string(r"a \boxed{x_{1}} b") == r"\boxed{x_{1}}"
    assert math_dapo.last_boxed_only_string(r"\fbox{1}") is None
    assert math_dapo.remove_boxed(r"\boxed{x_{1}}") == "x_{1}"
    assert math_dapo.verify("Answer: 34", "34") == (True, "34")
    assert math_dapo.is_correct_minerva("Answer: 35", "34") == (False, "35")
    assert math_dapo.verify(r"it is \boxed{7}", "7", strict_box_verify=True) == (True, "7")


def test_each_test_of_a_program_has_its_own_verdict():
    cases = {"inputs": ["1\n", "2\n"], "outputs": ["2\n", "9\n"]}
    assert run_test(cases, "print(int(input()) + 1)")[0] == [True, False]


BOXED, THOUGHT = r"<think>a</think>\boxed{4}", "<think>a</think><answer>4</answer>"
CALLS = [
    (gsm8k.compute_score, ("#### 18", "18"), {}, 1.0),
    (gsm8k.compute_score, ("it is 18", "18"), {"method": "flexible", "score": 2.0}, 2.0),
    (gsm8k.compute_score, ("#### 17", "18"), {"format_score": 0.1}, 0.1),
    (gsm8k.extract_solution, ("#### 1,800",), {"method": "strict"}, "1800"),
    (math_reward.compute_score, (r"\boxed{\frac12}", r"\frac{1}{2}"), {}, 1.0),
    (math_batch.compute_score_batched, (["a"] * 2, [r"\boxed{1}", "1"], ["1", "1"], [None] * 2), {}, [1.0, 0.0]),
    (math_dapo.compute_score, ("Answer: 3", "4"), {}, {"score": -1.0, "acc": False, "pred": "3"}),
    (math_dapo.compute_score, (BOXED, "4", True), {}, {"score": 1.0, "acc": True, "pred": "4"}),
    (prime_math.compute_score, (r"\boxed{0.5}", r"\frac{1}{2}"), {}, (True, True, "0.5")),
    (geo3k.compute_score, (BOXED, "4"), {}, 1.0),
    (geo3k.compute_score, ("4", "4"), {"use_boxed": False, "format_score": 0.2}, 0.8),
    (geo3k.acc_reward, (r"\boxed{4}", "4"), {}, 1.0),
    (geo3k.format_reward, (r"\boxed{4}",), {}, 0.0),
    (search_r1_like_qa_em.compute_score, ("<answer>The J. Doe</answer>", {"target": ["j doe"]}), {}, 1.0),
    (search_r1_like_qa_em.compute_score_subem, ("<answer>J. Doe of Ohio</answer>", {"target": ["j doe"]}), {}, 1.0),
    (search_r1_like_qa_em.em_check, ("J. Doe of Ohio", ["j doe"]), {}, 0),
    (search_r1_like_qa_em.subem_check, ("J. Doe of Ohio", ["j doe"]), {}, 1),
    (openr1mm.compute_score, (THOUGHT, "<answer>4</answer>"), {}, 1.0),
    (openr1mm.compute_score, (f"{THOUGHT}<answer>4</answer>", "4"), {}, 0.0),
    (openr1mm.format_reward, ("<answer>4</answer><think>a</think>",), {}, 0.0),
    (tinyllava_video_r1.compute_score, ("<answer>b</answer>", "<answer>C</answer>"), {}, 0.0),
]


@pytest.mark.parametrize(("scorer", "given", "named", "expected"), CALLS)
def test_every_scorer_is_called_as_documented(scorer, given, named, expected):
    assert scorer(*given, **named) == pytest.approx(expected)
