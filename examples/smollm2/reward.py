"""Rule rewards of the tasks for SmolLM2: is the last number the sum, does the expression reach the number?"""

from __future__ import annotations

import ast
import operator
import re
from collections import Counter
from fractions import Fraction
from typing import Any

NUMBER = re.compile(r"-?\d+")
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
LONGEST = 100


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None):
    """1.0 or 0.0; a Countdown answer that uses the numbers as it may and misses the goal gets 0.1.

    Of a conversation with the calculator, the model's last turn counts.
    """
    if data_source == "addition":
        numbers = NUMBER.findall(solution_str.replace(",", ""))
        return float(bool(numbers) and numbers[-1] == ground_truth)
    if data_source == "products":
        rest = solution_str.rpartition("</tool_call>")[2]
        last = rest.rpartition("\nassistant\n")[2] if rest != solution_str else rest
        return {
            "score": float(NUMBER.findall(last)[-1:] == [ground_truth]),
            "called": float("</tool_call>" in solution_str),
        }
    if data_source == "countdown":
        return countdown(solution_str, ground_truth)
    raise ValueError(f"no rule for data_source={data_source!r}: addition, countdown, products")


def countdown(solution: str, ground_truth: str) -> float:
    """The last line's expression, held against ``goal: a b c``."""
    goal, _, given = ground_truth.partition(": ")
    lines = [line for line in solution.splitlines() if line.strip()]
    expression = lines[-1].partition("=")[0].strip() if lines else ""
    try:
        value, used = _evaluate(ast.parse(expression[:LONGEST], mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return 0.0
    if Counter(used) != Counter(map(int, given.split())):
        return 0.0
    return 1.0 if value == int(goal) else 0.1


def _evaluate(node: ast.AST) -> tuple[Fraction, list[int]]:
    """The value of an expression of integers, and those integers; nothing else is an expression."""
    if isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) < 10_000:
        return Fraction(node.value), [node.value]
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left, of_left = _evaluate(node.left)
        right, of_right = _evaluate(node.right)
        return OPERATORS[type(node.op)](left, right), of_left + of_right
    raise ValueError("not an expression of integers")
