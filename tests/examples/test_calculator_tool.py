"""The calculator computes exactly, refuses what is too large or too deep, and evaluates nothing."""

from __future__ import annotations

import ast
import asyncio
import math
import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.calculator.tool import CalculatorTool, calculate, shown


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1+2*3", "7"), ("(1+2)*3", "9"), ("-2^2", "-4"), ("2^-2", "0.25"), ("2**3**2", "512"), ("7//2", "3"),
        ("-7//2", "-4"), ("7%4", "3"), ("10/4", "2.5"), ("1/3", "0.3333333333"), ("0.1+0.2", "0.3"), ("1e3", "1000"),
        ("sqrt(16)", "4"), ("sqrt(9/4)", "1.5"), ("abs(-3)", "3"), ("min(3, 1, 2)", "1"), ("round(2.567, 2)", "2.57"),
        ("floor(-0.5)", "-1"), ("ceil(0.2)", "1"), ("3×4÷2", "6"), (" 5 ", "5"), ("--5", "5"), ("2*-3", "-6"),
        ("12345678901234567890*98765432109876543210", "1219326311370217952237463801111263526900"),
    ],
)  # fmt: skip
def test_expressions_have_their_value(expression, value):
    assert shown(calculate(expression)) == value


@pytest.mark.parametrize(
    "expression",
    [
        "", "1+", "(1", "1)", "1 2", "1/0", "5%0", "5//0", "0^-1", "sqrt(-1)", "(-1)^0.5", "x", "f(1)", "1;2", "a.b",
        "__import__('os')", "().__class__", "9**9**9", "2^99999", "9" * 501, "(" * 400, "-" * 400 + "1", "round(1, 99)",
        "sqrt()", "min(1,)", "1e400*1e400*1e400*1e400*1e400", "10^400/3",
    ],
)  # fmt: skip
def test_what_cannot_be_computed_is_said_at_once(expression):
    start = time.process_time()
    with pytest.raises(ValueError):
        shown(calculate(expression))
    assert time.process_time() - start < 1


LEAF = st.integers(0, 200).map(str)
EXPRESSIONS = st.recursive(
    LEAF, lambda e: st.tuples(e, st.sampled_from("+-*/"), e).map(lambda t: f"({t[0]}{t[1]}{t[2]})"), max_leaves=8
)


def exact(node: ast.expr) -> Fraction:
    """The value of Python's own reading of the text, in fractions."""
    if isinstance(node, ast.Constant):
        return Fraction(node.value)
    assert isinstance(node, ast.BinOp)
    left, right = exact(node.left), exact(node.right)
    kind = type(node.op).__name__
    return {"Add": left + right, "Sub": left - right, "Mult": left * right}.get(kind) or (
        left / right if kind == "Div" else Fraction(0)
    )


@settings(max_examples=300, deadline=None)
@given(EXPRESSIONS)
def test_random_expressions_agree_with_fractions(expression):
    try:
        expected = exact(ast.parse(expression, mode="eval").body)
    except ZeroDivisionError:
        with pytest.raises(ValueError):
            calculate(expression)
        return
    assert calculate(expression) == expected


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="0123456789+-*/%^().,e sqrtminax", max_size=40))
def test_any_text_is_a_number_or_a_reason(text):
    try:
        value = calculate(text)
    except ValueError:
        return
    assert isinstance(value, Fraction) or math.isfinite(value) or math.isinf(value)


def test_the_tool_answers_with_the_value_or_with_the_reason():
    tool = CalculatorTool({"reward": 0.5})

    def ask(parameters):
        answer, reward, metrics = asyncio.run(tool.execute("x", parameters))
        return answer.text, reward, metrics["error"]

    assert tool.name == "calculator"
    assert ask({"expression": "2*3"}) == ("6", 0.5, 0.0)
    assert ask({"expression": 7}) == ("7", 0.5, 0.0)
    for wrong in ({}, {"expression": None}, {"expression": ["1"]}, {"expression": "1/0"}):
        text, reward, error = ask(wrong)
        assert text.startswith("Error: ") and reward is None and error == 1.0
