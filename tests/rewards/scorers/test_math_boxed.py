r"""MATH: which box counts, and which spellings are one answer."""

from __future__ import annotations

import pytest

from verl.rewards.scorers.math_boxed import compute_score, is_equiv, last_boxed, normalize


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"so \boxed{5} it is", "5"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\frac{a}{\sqrt{b}}}", r"\frac{a}{\sqrt{b}}"),
        (r"first \fbox{3}", "3"),
        (r"\fbox{3} but \boxed{4}", "4"),
        (r"$\boxed 7$ and more", "7"),
        (r"\boxed{1} $\boxed 7$", "7"),
        (r"$\boxed 7$, no, \boxed{8}", "8"),
        (r"$x = \boxed 7 cm$", "7 cm"),
        ("in a \\boxed environment. We get $2+3$, so \\boxed{5}", "5"),
        ("\\boxed{5}. Remember that \\boxed was asked for.", "5"),
        ("$2$ and \\boxed{5}, which goes into \\boxed as it should, $3$", "5"),
        (r"\boxed{5}. I was to write it as \boxed{}.", "5"),
        (r"\boxed{5} in the form \boxed{...} or \boxed{\dots}", "5"),
        (r"\boxed {5}.", "5"),
        (r"\boxed{5}, with \boxed", "5"),
        (r"\boxed{4} and \boxed{5", None),
        (r"\fbox{3}, in no \boxed at all", "3"),
        (r"\boxed{unbalanced {a}", None),
        (r"\boxed", None),
        (r"\boxed5 {6}", None),
        ("no box", None),
        ("", None),
    ],
)
def test_the_last_box_is_read(text, inside):
    assert last_boxed(text) == inside


@pytest.mark.parametrize("spelling", [r"\dfrac{1}{2}", r"\frac12", "1/2", "0.5", r"\tfrac{1}{2}", ".5", r"\frac1{2}"])
def test_one_half_has_many_spellings(spelling):
    assert normalize(spelling) == r"\frac{1}{2}"
    assert compute_score(rf"\boxed{{{spelling}}}", r"\frac12") == 1.0


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("x=5", "5", True),
        ("xyz=5", "5", False),
        ("x=y=5", "5", False),
        (r"10\%", "10", True),
        (r"3\text{ cm}", "3", True),
        (r"\$12", "12", True),
        ("(1, 2)", "(1,2)", True),
        ("1,000", "1000", False),
        (r"90^\circ", "90", True),
        (r"90^{\circ}", "90", True),
        (r"\left(1,2\right)", "(1,2)", True),
        (r"\sqrt3", r"\sqrt{3}", True),
        (r"\frac1{72}", r"\frac{1}{72}", True),
        ("02/4", r"\frac{2}{4}", False),  # not how an integer is written
        ("-3/4", r"\frac{-3}{4}", True),
        ("a\nb", "ab", True),
        (r"5\!", "5", True),
        ("{.3}", "{0.3}", True),
        (r"\frac", r"\frac", True),
        (r"\sqrt", r"\sqrt", True),
        (None, None, True),
        (None, "5", False),
        ("5", None, False),
    ],
)
def test_answers_are_equal_after_normalisation(first, second, same):
    assert is_equiv(first, second) is same


def test_no_box_scores_nothing_even_if_the_number_is_there():
    assert compute_score("the answer is 5", "5") == 0.0
    assert compute_score(r"the answer is \boxed{5}", 5.0) == 1.0
