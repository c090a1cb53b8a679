r"""Programs against tests: APPS [2105.09938], TACO, CodeContests, Codeforces, by ``stdin`` or by calling a function.

The program is what the last fence of the answer holds. It runs elsewhere (`verl.rewards.programs`), once per test; the
outputs that are expected never leave this process, so that a program can only pass by computing them.
"""

from __future__ import annotations

import ast
import json
import math
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from verl.errors import DataError
from verl.json_text import read_json
from verl.rewards.programs import CodeRunner, does_not_compile
from verl.rewards.scorers.text import same_integer
from verl.sandbox import Outcome

SECONDS = 5.0
MOST_SECONDS = 25.0
PARTIAL_TESTS = 10
RELATIVE = 1e-5
LONGEST_NUMBERS = 100_000
FENCE = "```"
OPENING = re.compile(r"```(?:python|py)\b", re.IGNORECASE)
NUMBER = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3})?")
IMPORTS = (
    "import sys, os, re, math, random, string, bisect, heapq, itertools, functools, collections, operator, copy, json\n"
    "from math import *\nfrom collections import *\nfrom itertools import *\nfrom functools import *\n"
    "from heapq import *\nfrom bisect import *\nfrom typing import *\nsys.setrecursionlimit(100000)\n"
)
CALL = """

def _call_of_the_test():
    import json as j, sys as s
    request = j.loads(s.stdin.read())
    name, scope = request["name"], globals()
    target = getattr(scope["Solution"](), name) if name not in scope and "Solution" in scope else scope[name]
    result = target(*request["arguments"])
    s.stdout.flush()
    s.stdout.write("\\n" + request["mark"] + j.dumps(result, default=list) + "\\n")
    s.stdout.flush()


_call_of_the_test()
"""


@dataclass(frozen=True)
class Test:
    """One test: what the program reads or is called with, and what is expected."""

    given: Any
    expected: Any


@dataclass(frozen=True)
class Tests:
    """The tests of a problem; ``name`` of the function, None for programs that read and print."""

    tests: list[Test]
    name: str | None


def compute_score(
    solution_str: str,
    ground_truth: object,
    runner: CodeRunner,
    continuous: bool = False,
    seconds: float = SECONDS,
    most_seconds: float = MOST_SECONDS,
) -> dict[str, Any]:
    """``{"score", "acc", "passed", "tests", "verdict"}``: 1.0 if every test passes.

    Args:
        ground_truth: ``{"inputs": [...], "outputs": [...]}``, with ``fn_name`` for tests that call a function, or that
            as JSON.
        continuous: otherwise the share of the first ten tests that pass, instead of 0.
        seconds: for one test.
        most_seconds: that the program may run in all tests; tests that do not get their turn have failed. Waiting for
            a place to run does not count.

    Raises:
        DataError: the ground truth holds no tests.
        SandboxError: no program could be run; the sample has no score.
    """
    problem = read_tests(ground_truth)
    code = extract_code(solution_str)
    passed, left, verdict = [], most_seconds, "passed"
    for number, test in enumerate(problem.tests):
        if left <= 0 or not code.strip():
            passed.append(False)
            verdict = "timeout" if left <= 0 else "empty"
            continue
        right, said, spent = _try(code, test, problem.name, runner, min(seconds, left))
        left -= spent
        passed.append(right)
        verdict = verdict if right else said
        if said == "not compiled" or (not right and (not continuous or number + 1 >= PARTIAL_TESTS)):
            break
    complete = all(passed) and len(passed) == len(problem.tests)
    share = sum(passed[:PARTIAL_TESTS]) / min(len(problem.tests), PARTIAL_TESTS)
    score = 1.0 if complete else (share if continuous else 0.0)
    if not complete and score == 1.0:  # the first ten passed, a later one did not
        score = (len(problem.tests) - 1) / len(problem.tests)
    return {"score": score, "acc": complete, "passed": sum(passed), "tests": len(problem.tests), "verdict": verdict}


def extract_code(text: str) -> str:
    """What the last ``python`` fence holds, else the last fence of any kind, else the whole text."""
    opened = list(OPENING.finditer(text))
    if opened:
        start = opened[-1].end()
    else:
        pieces = text.split(FENCE)
        if len(pieces) < 3:
            return text
        return pieces[-2 if len(pieces) % 2 else -1].partition("\n")[2]
    end = text.find(FENCE, start)
    return text[start:].partition("\n")[2] if end < 0 else text[start:end].partition("\n")[2]


def read_tests(ground_truth: object) -> Tests:
    """The tests of a row, from JSON or as they are."""
    tests = ground_truth
    if isinstance(tests, (str, bytes)):
        try:
            tests = read_json(tests)
        except ValueError as error:
            raise DataError("the tests of a program are not valid JSON", key="reward_model.ground_truth") from error
    if not isinstance(tests, Mapping) or tests.get("inputs") is None or tests.get("outputs") is None:
        raise DataError(
            "a program needs tests",
            key="reward_model.ground_truth",
            allowed='{"inputs": [...], "outputs": [...]} of equal length, with "fn_name" for a function',
        )
    inputs, outputs = _listed(tests["inputs"]), _listed(tests["outputs"])
    if not inputs or len(inputs) != len(outputs):
        raise DataError(
            "inputs and outputs of the tests do not match",
            key="reward_model.ground_truth",
            got=f"{len(inputs)} inputs, {len(outputs)} outputs",
        )
    return Tests([Test(a, b) for a, b in zip(inputs, outputs)], tests.get("fn_name") or None)


def _listed(value: Any) -> list[Any]:
    value = value.tolist() if hasattr(value, "tolist") else value
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _try(code: str, test: Test, name: str | None, runner: CodeRunner, seconds: float) -> tuple[bool, str, float]:
    """Whether the program passes one test, what is to be said if not, and the seconds for which it ran."""
    start = time.monotonic()
    if name is None:
        text = "\n".join(map(str, test.given)) if isinstance(test.given, list) else str(test.given)
        outcome = runner.run(IMPORTS + code, text, seconds)
        right = outcome.ok and same_output(outcome.stdout, _text(test.expected))
    else:
        mark = f"<{secrets.token_hex(8)}>"
        call = {"name": name, "arguments": _arguments(test.given), "mark": mark}
        outcome = runner.run(IMPORTS + code + CALL, json.dumps(call), seconds)
        right = outcome.ok and _returned(outcome, mark, test.expected)
    spent = outcome.seconds or (seconds if outcome.status == "timeout" else time.monotonic() - start)
    if right:
        return True, "passed", spent
    verdict = "wrong" if outcome.ok else "not compiled" if does_not_compile(outcome) else outcome.status
    return False, verdict, spent


def _arguments(given: Any) -> list[Any]:
    """The arguments of a call: a list, or a JSON value per line."""
    if isinstance(given, str):
        return [_value(line) for line in given.splitlines() if line.strip()]
    return _listed(given)


def _value(text: str) -> Any:
    try:
        return read_json(text)
    except ValueError:
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return text


def _returned(outcome: Outcome, mark: str, expected: Any) -> bool:
    """Whether the value behind the mark is the expected one; some data sets put that into a list of one."""
    line = outcome.stdout.rpartition(mark)[2].partition("\n")[0] if mark in outcome.stdout else ""
    try:
        value = read_json(line)
    except ValueError:
        return False
    expected = _value(expected) if isinstance(expected, str) else expected
    expected = json.loads(json.dumps(expected, default=list))  # tuples as lists, as the value has them
    wrapped = isinstance(expected, list) and len(expected) == 1
    return _same_value(value, expected) or (wrapped and _same_value(value, expected[0]))


def _same_value(value: Any, expected: Any) -> bool:
    if isinstance(value, bool) != isinstance(expected, bool):
        return False
    if isinstance(value, dict) and isinstance(expected, dict):
        return value.keys() == expected.keys() and all(_same_value(value[key], expected[key]) for key in value)
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(_same_value, value, expected))
    if not isinstance(value, (int, float)) or not isinstance(expected, (int, float)) or value == expected:
        return value == expected
    if isinstance(value, int) and isinstance(expected, int):
        return False
    return _near(value, expected, 1e-9) and (type(value) is type(expected) or _same_whole(value, expected))


def _text(expected: Any) -> str:
    return "\n".join(map(str, expected)) if isinstance(expected, (list, tuple)) else str(expected)


def same_output(printed: str, expected: str) -> bool:
    """Equal line by line without blanks at the ends, else word by word, numbers within 1e-5 of each other."""
    ours, theirs = _lines(printed), _lines(expected)
    if ours == theirs:
        return True
    words, expected_words = " ".join(ours).split(), " ".join(theirs).split()
    if words == expected_words:
        return True
    if len(words) != len(expected_words) or not words or len(words) > LONGEST_NUMBERS:
        return False
    return all(a == b or _same_number(a, b) for a, b in zip(words, expected_words))


def _lines(text: str) -> Sequence[str]:
    return [line.strip() for line in text.strip().splitlines() if line.strip()]


def _same_number(first: str, second: str) -> bool:
    """Two decimals that are near; two whole numbers have to be the same, however long they are."""
    if len(first) > 60 or len(second) > 60 or not (NUMBER.fullmatch(first) and NUMBER.fullmatch(second)):
        return False
    a, b = Fraction(first), Fraction(second)
    integers = [text.lstrip("+-").isdigit() for text in (first, second)]
    if a == b or all(integers):
        return a == b
    written = [one for one, is_whole in ((a, integers[0]), (b, integers[1])) if is_whole]
    return _near(float(first), float(second), RELATIVE * RELATIVE) and (not written or same_integer(a, b))


def _same_whole(value: int | float, expected: int | float) -> bool:
    """Whether a float and an int mean the same whole number, or the float is the nearest to a large one."""
    return float(value) == float(expected) or same_integer(Fraction(value), Fraction(expected))


def _near(first: float, second: float, absolute: float) -> bool:
    """Within 1e-5 of each other; whole numbers that no float can hold are near to none."""
    try:
        a, b = float(first), float(second)
    except OverflowError:
        return False
    return math.isfinite(a) and math.isfinite(b) and math.isclose(a, b, rel_tol=RELATIVE, abs_tol=absolute)
