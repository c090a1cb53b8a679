"""A few hundred random texts for every scorer, and some programs, as in every run of the suite; more by hand."""

from __future__ import annotations

from random import Random

import pytest

from tests.fuzzing import programs, texts
from tests.fuzzing.run import lines, parsers, run, run_programs, scorers
from verl.registry import TOOL_PARSERS


@pytest.mark.parametrize("name", scorers())
def test_no_text_makes_a_scorer_raise_or_work_for_long(name):
    count = 50 if name == "formulas" else 150
    (report,) = run({name: scorers()[name]}, count, seed=1).values()
    assert report.faults == [] and report.texts == count


def test_no_text_makes_a_parser_of_tool_calls_raise():
    reports = run(parsers(), 2200, seed=1)
    assert reports.keys() == {f"parser {name}" for name in TOOL_PARSERS.builtin_targets()}
    assert [fault for report in reports.values() for fault in report.faults] == []


def test_no_program_is_masked():
    report, verdicts = run_programs(24, seed=1)
    assert report.faults == [] and report.texts == sum(verdicts.values()) == 24


def test_a_seed_always_makes_the_same_texts_and_programs():
    for made in (texts.texts, programs.programs):
        first, again, other = (made(Random(seed)) for seed in (3, 3, 4))
        heads = [[next(source) for _ in range(20)] for source in (first, again, other)]
        assert heads[0] == heads[1] != heads[2]


def test_a_reader_that_raises_or_scores_what_is_no_number_is_reported():
    def divides(text, random):
        return 1 / text.count("7")

    def not_a_number(text, random):
        return {"score": float("nan")}

    reports = run({"divides": divides, "nan": not_a_number}, 100, seed=1)
    assert any("ZeroDivisionError" in fault for fault in reports["divides"].faults)
    assert len(reports["nan"].faults) == 50
    assert "50 faults" in "\n".join(lines(reports))
