"""Helpers that reward files import from upstream's scorers, and files that are written with them."""

from __future__ import annotations

import pytest

from verl.utils.reward_score import math_dapo, math_reward
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
