"""What runs in the process of `symbolic`: values of formulas at points, and proofs by sympy.

Formulas come as trees, and sympy's objects are made from its classes: no text reaches ``sympify`` or ``eval``.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable
from typing import Any

import sympy

from verl.rewards.scorers.expression import Tree, UnreadableError, letters, parse

NEAR = 1e-9
POINTS = ((0.7390851, 1.4513692, 2.1544347, 0.5671433), (-1.8392868, 0.4142136, -1.3247180, 2.6651442))
FUNCTIONS: dict[str, Callable[[complex], complex]] = {
    "sin": cmath.sin, "cos": cmath.cos, "tan": cmath.tan, "arcsin": cmath.asin, "arccos": cmath.acos,
    "arctan": cmath.atan, "ln": cmath.log, "exp": cmath.exp, "log": cmath.log10,
    "cot": lambda z: 1 / cmath.tan(z), "sec": lambda z: 1 / cmath.cos(z), "csc": lambda z: 1 / cmath.sin(z),
}  # fmt: skip


def compute_score(solution_str: str, ground_truth: str) -> float:
    """1.0 if the two formulas are equal, else 0.0."""
    try:
        return float(same_value(parse(solution_str), parse(ground_truth)))
    except (UnreadableError, ArithmeticError, ValueError, TypeError, RecursionError, MemoryError):
        return 0.0


def same_value(first: Tree, second: Tree) -> bool:
    """Equal at two fixed points of their unknowns, and equal to sympy."""
    names = sorted(letters(first) | letters(second))
    for point in POINTS:
        at = dict(zip(names, point))
        if len(names) > len(point) or not _near(value(first, at), value(second, at)):
            return False
    gap = _formula(first) - _formula(second)
    return bool(gap == 0 or sympy.simplify(gap) == 0)


def value(tree: Tree, at: dict[str, float]) -> complex:
    """The tree as a number. Raises ArithmeticError or ValueError where it has none."""
    kind, parts = tree[0], tree[1:]
    if kind == "num":
        return complex(float(parts[0]))
    if kind == "const":
        return {"pi": complex(math.pi), "e": complex(math.e), "i": 1j, "oo": complex(math.inf)}[parts[0]]
    if kind == "sym":
        return complex(at[parts[0]])
    if kind == "fn":
        return FUNCTIONS[parts[0]](value(parts[1], at))
    numbers = [value(part, at) for part in parts]
    return _OPERATORS[kind](*numbers)


_OPERATORS: dict[str, Callable[..., complex]] = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "neg": lambda a: -a,
    "pow": lambda a, b: a**b,
    "abs": lambda a: complex(abs(a)),
    "root": lambda n, a: a ** (1 / n),
    "fact": lambda a: complex(math.factorial(int(a.real))),
}


def _near(a: complex, b: complex) -> bool:
    if cmath.isinf(a) or cmath.isinf(b):
        return a == b
    return cmath.isclose(a, b, rel_tol=NEAR, abs_tol=NEAR)


def _formula(tree: Tree) -> Any:
    """The tree as sympy's, made from its classes, exact: ``0.5`` is a half."""
    kind, parts = tree[0], tree[1:]
    if kind == "num":
        return sympy.Rational(parts[0] + "0" if parts[0].endswith(".") else parts[0])
    if kind == "const":
        return {"pi": sympy.pi, "e": sympy.E, "i": sympy.I, "oo": sympy.oo}[parts[0]]
    if kind == "sym":
        return sympy.Symbol(parts[0], real=True)
    if kind == "fn":
        inner = _formula(parts[1])
        name = {"ln": "log", "arcsin": "asin", "arccos": "acos", "arctan": "atan"}.get(parts[0], parts[0])
        return sympy.log(inner, 10) if parts[0] == "log" else vars(sympy)[name](inner)
    made = [_formula(part) for part in parts]
    if kind == "root":
        return sympy.root(made[1], made[0])
    special = {"abs": sympy.Abs, "fact": sympy.factorial}
    return special[kind](*made) if kind in special else _OPERATORS[kind](*made)
