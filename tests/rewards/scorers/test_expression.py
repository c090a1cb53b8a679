"""Formulas become trees, by hand; what is costly, ambiguous or code does not."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.rewards.scorers.expression import UnreadableError, letters, parse


def num(text: str) -> tuple:
    return ("num", text)


X = ("sym", "x")


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        (r"\frac{x}{2}", ("div", X, num("2"))),
        (r"\frac12", ("div", num("1"), num("2"))),
        (r"\dfrac1{72}", ("div", num("1"), num("72"))),
        ("2x", ("mul", num("2"), X)),
        ("-x^2", ("neg", ("pow", X, num("2")))),
        ("x-1", ("add", X, ("neg", num("1")))),
        ("1/2x", ("mul", ("div", num("1"), num("2")), X)),
        (r"\sqrt[3]{8}", ("root", num("3"), num("8"))),
        (r"2\sqrt{3}", ("mul", num("2"), ("root", num("2"), num("3")))),
        (r"\sin^2 x", ("pow", ("fn", "sin", X), num("2"))),
        (r"\log_2 8", ("div", ("fn", "ln", num("8")), ("fn", "ln", num("2")))),
        (r"90^\circ", num("90")),
        (r"90^{\circ}", num("90")),
        ("5!", ("fact", num("5"))),
        ("50%", ("div", num("50"), num("100"))),
        ("|x|", ("abs", X)),
        ("2**3", ("pow", num("2"), num("3"))),
        ("3π", ("mul", num("3"), ("const", "pi"))),
        (r"e^{i\pi}", ("pow", ("const", "e"), ("mul", ("const", "i"), ("const", "pi")))),
        (r"x_{1}", ("sym", "x_1")),
        (r"\left(x\right)", X),
    ],
)
def test_a_formula_becomes_the_tree_written_by_hand(text, tree):
    assert parse(text) == tree


@pytest.mark.parametrize(
    "text",
    ["", "()", "1 2", "x y z w v", "9^9^9", "9^(9^9)", "10^{1000}", "((9^9)^9)^9", "100!", "x!!!",
     "(" * 60 + "1" + ")" * 60, "-" * 60 + "1", "1" * 41, "x" * 500, "__import__", "exec('1')", "lambda:0", "x[0]",
     "a.b", "1;2", "{", r"\input{a}", r"\frac{1}", "²", "１", "\x00", "x=1", "f'(x)", '"a"', "{x!r}", "10^x^10^x"],
)  # fmt: skip
def test_what_is_costly_ambiguous_or_no_formula_is_refused(text):
    with pytest.raises(UnreadableError):
        parse(text)


def test_the_unknowns_are_counted_once():
    assert letters(parse(r"x+x_1+\alpha x")) == {"x", "x_1", "alpha"}


PIECES = st.sampled_from(
    [*"0123456789xyz+-*/^_(){}[]|!% .", r"\frac", r"\sqrt", r"\pi", r"\sin", "sin", "**", "π", "√"]
)


@settings(max_examples=400, deadline=None)
@given(st.lists(PIECES, max_size=60).map("".join))
def test_any_mixture_of_signs_is_a_tree_or_refused(text):
    try:
        tree = parse(text)
    except UnreadableError:
        return
    assert isinstance(tree, tuple) and len(letters(tree)) <= 4
