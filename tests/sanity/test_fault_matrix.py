"""The tables of faults and attacks: their rows name tests that exist, and the pages show what those came to."""

from __future__ import annotations

import ast
import functools

import pytest

from tests.faults import matrix
from tests.faults.matrix import Result, Row, digest, page, read_results, result_of, rows
from tests.sanity.source_tree import ROOT

NAMES = [*(f"F{n}" for n in range(1, 29)), *(f"A{n}" for n in range(1, 33))]


@functools.cache
def slow_by_test(file: str) -> dict[str, bool]:
    """The tests of a file by the names that pytest gives them, each with whether it has the marker `slow`."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    file_mark = [n for n in tree.body if isinstance(n, ast.Assign) and "pytestmark" in ast.unparse(n.targets[0])]
    levels = [("", tree.body, file_mark)]
    levels += [(f"{n.name}::", n.body, n.decorator_list) for n in tree.body if isinstance(n, ast.ClassDef)]
    slow = {}
    for prefix, body, marks in levels:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                all_marks = " ".join(map(ast.unparse, [*file_mark, *marks, *node.decorator_list]))
                slow[f"{file}::{prefix}{node.name}"] = "mark.slow" in all_marks
    return slow


@pytest.mark.parametrize("name", NAMES)
def test_a_row_names_tests_that_exist_or_says_why_there_are_none(name: str):
    row = rows()[name]
    assert row.done and row.promise and bool(row.layer) == name.startswith("A")
    assert row.quick or row.slow or row.missing
    for tests, is_slow in ((row.quick, False), (row.slow, True)):
        for test in (f"tests/{test}" for test in tests):
            there = slow_by_test(test.partition("::")[0])
            assert there.get(test) == is_slow, f"{test} is not there, or its marker slow is {not is_slow}"


def test_all_faults_and_attacks_have_a_row():
    assert list(rows()) == NAMES


@pytest.mark.parametrize(("kind", "file"), [("F", "faults.md"), ("A", "attacks.md")])
def test_a_page_shows_the_rows_and_the_results(kind: str, file: str):
    shown = (matrix.PAGES / file).read_text(encoding="utf-8")
    assert shown == page(kind, read_results(matrix.PAGES)), "run python -m tests.faults.matrix NAME_OF_A_ROW"


def line(test: str, outcome: str = "passed", **more: object) -> dict[str, object]:
    return {"test": test, "outcome": outcome, "seconds": 1.25, **more}


def test_a_row_fails_with_any_of_its_tests_and_where_one_did_not_run():
    tests = ["tests/a.py::test_one", "tests/a.py::test_two"]
    lines = [line("tests/a.py::test_one[x]"), line("tests/a.py::test_one[y]"), line("tests/a.py::test_on")]
    assert result_of(tests, lines).result == "failed: test_two (did not run)"
    lines += [line("tests/a.py::test_two", "failed")]
    assert result_of(tests, lines).result == "failed: test_two"
    lines[-1] = line("tests/a.py::test_two", "skipped", reason="needs a GPU")
    result = result_of(tests, lines)
    assert (result.result, result.seconds, result.is_failed) == ("2 passed, 1 left out: needs a GPU", 3.8, False)


def test_of_several_measures_the_longest_time_and_all_losses_count():
    measures = [
        {"noticed_seconds": 0.5, "lost": 1, "bits_equal": True},
        {"noticed_seconds": 0.25, "lost": 2, "bits_equal": False},
    ]
    lines = [line(f"t::test_it[{number}]", measured=measured) for number, measured in enumerate(measures)]
    assert result_of(["t::test_it"], lines).measured == {"noticed_seconds": 0.5, "lost": 3, "bits_equal": False}


def test_a_result_of_other_tests_is_not_shown(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(matrix, "rows", lambda: {"F1": Row("F1", "done", "promise", quick=("a",), slow=("b",))})
    both, quick = digest(["tests/a", "tests/b"]), digest(["tests/a"])
    day = "2026-01-01"
    for tests, words in (
        (both, f"| 9 passed, {day} |"), (quick, f"| 9 passed, slow ones not run, {day} |"), ("?", "| not run yet |"),
    ):  # fmt: skip
        assert words in page("F", {"F1": Result("9 passed", 1.0, day, tests)})
