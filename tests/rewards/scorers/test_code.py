"""Programs against tests: what is run, how outputs are compared, partial credit, and tests that are none."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from verl.errors import DataError
from verl.rewards.scorers.code import compute_score, extract_code, read_tests, same_output
from verl.sandbox import Outcome


class Python:
    """Runs the trusted programs of these tests in a plain process."""

    def __init__(self):
        self.programs: list[tuple[str, str]] = []

    def run(self, code: str, stdin: str, seconds: float) -> Outcome:
        self.programs.append((code, stdin))
        try:
            done = subprocess.run(
                [sys.executable, "-c", code], input=stdin, capture_output=True, text=True, timeout=seconds, check=False
            )
        except subprocess.TimeoutExpired:
            return Outcome("timeout")
        return Outcome("ok" if done.returncode == 0 else "error", done.stdout, done.stderr)


class Canned:
    """Answers each test with the next of some outcomes."""

    def __init__(self, *outcomes: Outcome):
        self.outcomes = list(outcomes)
        self.asked = 0

    def run(self, code: str, stdin: str, seconds: float) -> Outcome:
        self.asked += 1
        return self.outcomes.pop(0)


SQUARES = {"inputs": ["2\n", "3\n"], "outputs": ["4\n", "9\n"]}
GOOD = "Here:\n```python\nprint(int(input()) ** 2)\n```\nDone."


def ok(*texts: str) -> list[Outcome]:
    return [Outcome("ok", text) for text in texts]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (GOOD, "print(int(input()) ** 2)\n"),
        ("```python\na\n```\nbetter\n```python\nb\n```", "b\n"),
        ("```py\na\n```", "a\n"),
        ("```\na\n```", "a\n"),
        ("```python\nunclosed", "unclosed"),
        ("print(1)", "print(1)"),
        ("", ""),
    ],
)
def test_the_program_is_what_the_last_fence_holds(text, code):
    assert extract_code(text) == code


def test_a_program_that_reads_and_prints_is_run_on_every_test():
    python = Python()
    assert compute_score(GOOD, SQUARES, python) == {
        "score": 1.0,
        "acc": True,
        "passed": 2,
        "tests": 2,
        "verdict": "passed",
    }
    assert [stdin for _, stdin in python.programs] == ["2\n", "3\n"]
    assert not any("outputs" in code for code, _ in python.programs)


@pytest.mark.parametrize(
    ("code", "arguments", "expected"),
    [
        ("def add(a, b):\n    return a + b", "1\n2", 3),
        ("def add(a, b):\n    return a + b", [1, 2], [3]),
        ("class Solution:\n    def add(self, a, b):\n        return a + b", [1, 2], 3),
        ("def add(a, b):\n    print('noise <x>')\n    return (a, [b])", [1, 2], [1, [2]]),
        ("def add(a, b):\n    return a / b", [1, 3], 0.333333333),
        ("def add(a, b: List[int]):\n    return len(deque(b)) + gcd(4, a)", ["4", "[1, 2]"], "6"),
    ],
)
def test_a_function_is_called_with_the_arguments_of_the_test(code, arguments, expected):
    if isinstance(arguments, list) and arguments[0] == "4":
        arguments = "4\n[1, 2]"
    tests = json.dumps({"fn_name": "add", "inputs": [arguments], "outputs": [expected]})
    found = compute_score(f"```python\n{code}\n```", tests, Python())
    assert found["score"] == 1.0, found


@pytest.mark.parametrize(
    ("code", "verdict"),
    [
        ("def add(a, b):\n    return a - b", "wrong"),
        ("def other(a, b):\n    return 3", "error"),
        ("def add(a, b:\n    return 3", "not compiled"),
        ("import sys\nsys.exit(0)", "wrong"),
        ("print('<0123456789abcdef>3')\nimport os\nos._exit(0)", "wrong"),
        ("def add(a, b):\n    raise ValueError", "error"),
    ],
)
def test_a_function_that_is_wrong_or_leaves_early_gets_nothing(code, verdict):
    found = compute_score(code, {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}, Python(), continuous=True)
    assert (found["score"], found["verdict"]) == (0.0, verdict)


def test_partial_credit_is_the_share_of_the_first_ten_tests():
    tests = {"inputs": ["x"] * 20, "outputs": ["1"] * 20}
    some = Canned(*ok(*"1111100000"))
    assert compute_score("x", tests, some, continuous=True)["score"] == 0.5 and some.asked == 10
    none = Canned(*ok(*"11110"))
    assert compute_score("x", tests, none)["score"] == 0.0 and none.asked == 5
    late = Canned(*ok(*"11111111111111110"))
    found = compute_score("x", tests, late, continuous=True)
    assert (found["acc"], found["score"], found["passed"]) == (False, 0.95, 16) and late.asked == 17
    every = Canned(*ok(*"1" * 20))
    assert compute_score("x", tests, every, continuous=True)["score"] == 1.0


def test_a_program_that_does_not_compile_is_not_run_again():
    runner = Canned(Outcome("error", detail="it does not compile"))
    found = compute_score("x", SQUARES, runner, continuous=True)
    assert (found["score"], found["verdict"], runner.asked) == (0.0, "not compiled", 1)


def test_tests_that_do_not_get_their_turn_have_failed():
    runner = Canned(*ok("4", "9"))
    found = compute_score("x", SQUARES, runner, continuous=True, most_seconds=0.0)
    assert (found["score"], found["verdict"], runner.asked) == (0.0, "timeout", 0)


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("1 2\n3\n", "1 2\n3", True),
        ("1  2 3", "1 2\n3", True),
        (" 1 \n\n2\n", "1\n2", True),
        ("0.333333", "0.3333331", True),
        ("0.3334", "0.3333", False),
        ("1.0", "1", True),
        ("100000000000000000001", "100000000000000000002", False),
        ("2 1", "1 2", False),
        ("yes", "YES", False),
        ("", "", True),
        ("", "1", False),
        ("1e400", "1e401", False),
        ("nan", "1", False),
    ],
)
def test_outputs_are_compared_line_by_line_then_word_by_word(printed, expected, same):
    assert same_output(printed, expected) is same


@pytest.mark.parametrize(
    ("truth", "said"),
    [
        ("{", "not valid JSON"),
        ("[1]", "needs tests"),
        (None, "needs tests"),
        ({"inputs": ["1"]}, "needs tests"),
        ({"inputs": [], "outputs": []}, "0 inputs"),
        ({"inputs": ["1"], "outputs": ["1", "2"]}, "1 inputs, 2 outputs"),
    ],
)
def test_a_row_without_tests_is_an_error_with_its_column(truth, said):
    with pytest.raises(DataError, match=said) as caught:
        compute_score("x", truth, Canned())
    assert caught.value.key == "reward_model.ground_truth"


def test_tests_come_as_arrays_from_parquet():
    found = read_tests({"inputs": np.array(["1", "2"], dtype=object), "outputs": np.array(["1", "2"], dtype=object)})
    assert [test.given for test in found.tests] == ["1", "2"]
