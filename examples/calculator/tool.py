"""Arithmetic as a tool: an expression is read by a small parser of its own and computed exactly where it can be.

Nothing that a model writes is evaluated as Python. Length, nesting and the size of numbers are limited, so that no
expression takes long.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from verl.tools.base import BaseTool, Executed
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

MAX_LENGTH, MAX_DEPTH, MAX_BITS, MAX_EXPONENT = 500, 50, 4096, 4096
SCHEMA = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Computes an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {
                "expression": {
                    "type": "string",
                    "description": "For example (3 + 4) * 2.5. Operators: + - * / // % ^ and parentheses; functions: "
                    "sqrt, abs, round, floor, ceil, min, max.",
                }
            },
            "required": ["expression"],
        },
    },
}
Number = Fraction | float
_TOKEN = re.compile(r"\s*(?:(\d+(?:\.\d*)?(?:[eE][+-]?\d{1,3})?|\.\d+)|([A-Za-z]+)|(\*\*|//|[-+*/%^(),×÷−]))")
_SAME = {"×": "*", "÷": "/", "−": "-", "**": "^"}


class CalculatorTool(BaseTool):
    """Answers an arithmetic expression with its value.

    An expression that cannot be computed is answered with the reason. ``config.reward`` is the step reward of one that
    can be (default: none).
    """

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return self.tool_schema or OpenAIFunctionToolSchema.model_validate(SCHEMA)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Executed:
        expression = parameters.get("expression")
        try:
            if not isinstance(expression, str | int | float) or isinstance(expression, bool):
                raise ValueError('"expression" has to be text')
            return ToolResponse(text=shown(calculate(str(expression)))), self.config.get("reward"), {"error": 0.0}
        except ValueError as error:
            return ToolResponse(text=f"Error: {error}"), None, {"error": 1.0}


def calculate(expression: str) -> Number:
    """The value of an arithmetic expression, as a fraction where it is rational.

    Raises:
        ValueError: it is none, or is too large to compute.
    """
    if len(expression) > MAX_LENGTH:
        raise ValueError(f"the expression has more than {MAX_LENGTH} characters")
    try:
        return _Expression(_tokens(expression)).whole()
    except (ArithmeticError, TypeError) as error:
        raise ValueError(str(error) or "it cannot be computed") from error


def shown(value: Number) -> str:
    """A number as people write it: whole numbers without a point, others with up to ten digits after it."""
    if isinstance(value, Fraction):
        if value.denominator == 1:
            return str(value.numerator)
        if abs(value.numerator) > 10**300 or value.denominator > 10**300:
            raise ValueError("the number is too large to be written as a decimal one")
        value = float(value)
    if not math.isfinite(value):
        raise ValueError("the result is not a finite number")
    text = f"{value:.10f}".rstrip("0").rstrip(".") if 1e-4 <= abs(value) < 1e15 or value == 0 else f"{value:.12g}"
    return "0" if text in ("-0", "") else text


def _tokens(expression: str) -> list[tuple[str, str]]:
    """(kind, text) of each token; kinds are number, name, sign, end."""
    tokens, at = [], 0
    expression = expression.rstrip()
    while at < len(expression):
        match = _TOKEN.match(expression, at)
        if match is None:
            raise ValueError(f"{expression[at:].lstrip()[:1]!r} is not allowed in an expression")
        number, name, sign = match.groups()
        tokens.append(("number", number) if number else ("name", name) if name else ("sign", _SAME.get(sign, sign)))
        at = match.end()
    return [*tokens, ("end", "")]


class _Expression:
    """A recursive-descent parser that computes while it reads."""

    def __init__(self, tokens: list[tuple[str, str]]):
        self.tokens, self.at, self.depth = tokens, 0, 0

    def whole(self) -> Number:
        value = self.sum()
        if self._kind() != "end":
            raise ValueError(f"{self._text()!r} does not fit there")
        return value

    def sum(self) -> Number:
        value = self.product()
        while sign := self._take("+", "-"):
            other = self.product()
            value = _bounded(value + other if sign == "+" else value - other)
        return value

    def product(self) -> Number:
        value = self.signed()
        while sign := self._take("*", "/", "//", "%"):
            other = self.signed()
            if sign != "*" and other == 0:
                raise ValueError("division by zero")
            if sign == "//":
                value = Fraction(math.floor(value / other))
            else:
                value = _bounded(value * other if sign == "*" else value / other if sign == "/" else value % other)
        return value

    def signed(self) -> Number:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ValueError("the expression is nested too deeply")
        sign = self._take("-", "+")
        value = self.signed() if sign else self.power()
        self.depth -= 1
        return -value if sign == "-" else value

    def power(self) -> Number:
        base = self.atom()
        return _power(base, self.signed()) if self._take("^") else base

    def atom(self) -> Number:
        kind, text = self.tokens[self.at]
        self.at += 1
        if kind == "number":
            return _bounded(Fraction(text))
        if kind == "name" and text in CONSTANTS:
            return CONSTANTS[text]
        if kind == "name":
            return self.function(text)
        if text == "(":
            value = self.sum()
            self._need(")")
            return value
        raise ValueError("the expression ends too early" if kind == "end" else f"{text!r} does not fit there")

    def function(self, name: str) -> Number:
        if name not in FUNCTIONS:
            raise ValueError(f"there is no function {name!r}")
        self._need("(")
        arguments = [self.sum()]
        while self._take(","):
            arguments.append(self.sum())
        self._need(")")
        return _bounded(FUNCTIONS[name](*arguments))

    def _kind(self) -> str:
        return self.tokens[self.at][0]

    def _text(self) -> str:
        return self.tokens[self.at][1]

    def _take(self, *signs: str) -> str:
        if self._kind() != "sign" or self._text() not in signs:
            return ""
        self.at += 1
        return self.tokens[self.at - 1][1]

    def _need(self, sign: str) -> None:
        if not self._take(sign):
            raise ValueError(f"{sign!r} is missing")


def _bounded(value: Any) -> Number:
    if isinstance(value, Fraction):
        if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
            raise ValueError("the number is too large")
        return value
    return Fraction(value) if isinstance(value, int) else value


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(exponent, Fraction) and exponent.denominator == 1 and isinstance(base, Fraction):
        size = max(base.numerator.bit_length(), base.denominator.bit_length())
        if abs(exponent.numerator) > MAX_EXPONENT or size * abs(exponent.numerator) > 2 * MAX_BITS:
            raise ValueError("the number is too large")
        if base == 0 and exponent < 0:
            raise ValueError("division by zero")
        return _bounded(base**exponent.numerator)
    if base < 0:
        raise ValueError("a root of a negative number")
    return math.pow(base, exponent)


def _root(value: Number) -> Number:
    if value < 0:
        raise ValueError("a root of a negative number")
    if isinstance(value, Fraction):
        top, bottom = math.isqrt(value.numerator), math.isqrt(value.denominator)
        if top * top == value.numerator and bottom * bottom == value.denominator:
            return Fraction(top, bottom)
    return math.sqrt(value)


def _round(value: Number, digits: Number = Fraction(0)) -> Number:
    if isinstance(digits, float) or digits.denominator != 1 or abs(digits) > 20:
        raise ValueError("round takes a whole number of digits")
    return Fraction(round(Fraction(value), int(digits)))


CONSTANTS: dict[str, Number] = {"pi": math.pi, "e": math.e}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "sqrt": _root, "abs": abs, "round": _round, "floor": math.floor, "ceil": math.ceil, "min": min, "max": max,
}  # fmt: skip
