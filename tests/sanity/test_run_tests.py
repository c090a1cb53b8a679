"""What `make test` starts ends with it, however it ends; and what its last lines say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from _pytest.mark.expression import Expression

from scripts import run_tests
from tests.outcomes import read

SCRIPT = Path(__file__).parents[2] / "scripts" / "run_tests.py"


@pytest.mark.slow
def test_a_killed_run_of_the_suite_leaves_no_pytest_behind(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    os.mkfifo(ready)
    sleeper = tmp_path / "test_sleeper.py"
    sleeper.write_text(f"import time\ndef test_sleep():\n    open({str(ready)!r}, 'w').close()\n    time.sleep(600)\n")
    run = subprocess.Popen([sys.executable, SCRIPT, "--kept", tmp_path / "kept", sleeper], stdout=subprocess.DEVNULL)
    ready.read_text()  # waits for the test to begin
    family = psutil.Process(run.pid).children(recursive=True)
    run.kill()
    assert len(family) >= 3  # the guard, pytest and the worker that sleeps
    assert psutil.wait_procs(family, timeout=60)[1] == []


FLAKY = """
import pathlib, pytest

def passes_the_second_time(name):
    with open(pathlib.Path(__file__).with_name(name), "a+") as log:
        log.seek(0)
        before = log.read()
        log.write("run")
    assert before

@pytest.mark.timed
def test_clock():
    passes_the_second_time("clock")

@pytest.mark.parametrize("", [pytest.param(marks=pytest.mark.alone), pytest.param(marks=pytest.mark.waiting)])
def test_so_that_no_pass_is_empty():
    pass

{unit}
"""
UNIT = """
def test_unit():
    passes_the_second_time("unit")
"""


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["", UNIT], ids=["only a flaky test", "a unit test, too"])
def test_only_timed_tests_run_again_and_a_pass_then_is_reported_as_flaky(tmp_path: Path, unit: str) -> None:
    file = tmp_path / "test_flaky.py"
    file.write_text(FLAKY.format(unit=unit))
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    timed\n    alone\n    waiting\n    slow\n")
    command = [sys.executable, SCRIPT, "--kept", tmp_path / "kept", file]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    reported = [line for line in run.stdout.splitlines() if line.startswith("flaky: ")]
    assert reported == ["flaky: test_flaky.py::test_clock"], run.stdout
    assert (tmp_path / "clock").read_text() == "runrun"
    assert run.returncode == bool(unit)
    assert not unit or (tmp_path / "unit").read_text() == "run"


def line(name: str, **facts: object) -> dict:
    return {
        "test": name,
        "outcome": "passed",
        "seconds": 1.0,
        "processes": 0,
        "ranks": 0,
        "marks": [],
        **facts,
    }


def test_a_slow_test_is_named_and_one_of_too_many_ranks_fails(capsys: pytest.CaptureFixture[str]):
    lines = [
        line("quick", seconds=4.9),
        line("slower", seconds=7.0),
        line("slowest", seconds=600.0),
        line("ranks", ranks=4),
        line("marked", seconds=60.0, ranks=4, marks=["slow"]),
    ]
    assert run_tests.broken_rules(lines) == ["starts 4 ranks without the marker slow: ranks"]
    assert capsys.readouterr().out.splitlines() == [
        "takes 7.0 s without the marker slow: slower",
        "takes 600.0 s without the marker slow: slowest",
    ]


def test_the_table_counts_by_folder_and_fits_into_sixty_columns():
    lines = {
        "parallel": [
            line("tests/rewards/test_a.py::test_b", seconds=90.0),
            line("tests/rewards/test_a.py::test_c", outcome="failed"),
            line("tests/e2e/test_a.py::test_b", outcome="skipped"),
        ],
        "trackers": [line("tests/engines_real/trackers/test_a.py::test_b")],
    }
    table = run_tests.table(lines, ["tests/rewards/test_a.py::test_b"], 3.25).splitlines()
    assert [row.split() for row in table] == [
        ["group", "passed", "failed", "flaky", "skipped", "minutes"],
        ["e2e", "0", "0", "0", "1", "0.0"],
        ["rewards", "1", "1", "1", "0", "1.5"],
        ["trackers", "1", "0", "0", "0", "0.0"],
        ["all,", "by", "the", "clock", "2", "1", "1", "1", "3.2"],
    ]
    assert max(map(len, table)) <= 60


@pytest.mark.parametrize(("codes", "status"), [([0, 5, 5], 0), ([5, 5, 5], 5), ([0, 1, 0], 1), ([0, 2], 2)], ids=str)
def test_a_pass_without_tests_is_no_failure_unless_all_are(codes: list[int], status: int):
    assert run_tests.status({str(number): (code, "") for number, code in enumerate(codes)}) == status


def test_a_representative_that_did_not_run_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run_tests, "REPRESENTATIVES", {"tests/a": "one", "tests/b": "two", "tests/c": "three"})
    lines = [[line("tests/a", marks=["slow"]), line("tests/b")]]
    found = [text.rpartition(" ")[2] for text in run_tests.absent_representatives(lines)]
    assert found == ["tests/b", "tests/c"]


def test_an_unknown_group_is_refused_with_those_that_exist(capsys: pytest.CaptureFixture[str]):
    assert run_tests.main(["--all", "--group=sandboxes"]) == 2
    said = capsys.readouterr().err
    assert "no group 'sandboxes'" in said and "sandbox, " in said and "trackers, vllm, adapters" in said


def test_a_full_temporary_folder_is_said_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=5 << 20))
    assert run_tests.main([]) == 2
    assert "has 5 MB left" in (said := capsys.readouterr().err) and "TMPDIR" in said


def test_each_pass_leaves_out_what_passed_in_that_pass_before(tmp_path: Path):
    first, second = (run_tests.Pass(name, "python", (), tmp_path) for name in ("parallel", "alone"))
    assert not any("--without-passed" in word for word in first.command())
    first.file.parent.mkdir()
    first.file.write_text("")
    assert f"--without-passed={tmp_path}/outcomes/parallel.jsonl" in first.command()
    assert not any("--without-passed" in word for word in second.command())


@pytest.mark.parametrize("words", [[], ["--all"], ["--all", "--group=trainer"]], ids=" ".join)
def test_every_test_is_in_exactly_one_pass_and_ranks_have_theirs(words: list[str]):
    options, further = run_tests.arguments([*words, "--trackers=none", "--vllm=none", "--adapters=none"])
    expressions = [one.words[-1] for one in run_tests.chosen_passes(options, further)]
    for marker in ("unmarked", "waiting", "processes", "alone"):
        marks = {marker, "slow", "representative"}
        chosen = [Expression.compile(text).evaluate(lambda name, m=marks, **_: name in m) for text in expressions]
        assert sum(chosen) == 1, (marker, expressions)
        assert chosen[0] == (marker == "unmarked" or (marker == "processes" and not words))


def test_outcomes_of_a_run_that_was_killed_are_read_as_far_as_they_go(tmp_path: Path):
    file = tmp_path / "outcomes.jsonl"
    file.write_text('{"test": "a", "outcome": "failed"}\n{"test": "a", "outcome": "passed"}\n{"test": "b", "outc')
    assert read(file) == [{"test": "a", "outcome": "passed"}]
