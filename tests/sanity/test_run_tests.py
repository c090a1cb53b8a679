"""What `make test` starts ends with it, however it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "run_tests.py"


def test_a_killed_run_of_the_suite_leaves_no_pytest_behind(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    os.mkfifo(ready)
    sleeper = tmp_path / "test_sleeper.py"
    sleeper.write_text(f"import time\ndef test_sleep():\n    open({str(ready)!r}, 'w').close()\n    time.sleep(600)\n")
    run = subprocess.Popen([sys.executable, SCRIPT, str(sleeper)], stdout=subprocess.DEVNULL)
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


@pytest.mark.parametrize("unit", ["", UNIT], ids=["only a flaky test", "a unit test, too"])
def test_only_timed_tests_run_again_and_a_pass_then_is_reported_as_flaky(tmp_path: Path, unit: str) -> None:
    file = tmp_path / "test_flaky.py"
    file.write_text(FLAKY.format(unit=unit))
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    timed\n    alone\n    waiting\n")  # names begin here
    run = subprocess.run([sys.executable, SCRIPT, str(file)], stdout=subprocess.PIPE, text=True, check=False)
    reported = [line for line in run.stdout.splitlines() if line.startswith("flaky: ")]
    assert reported == ["flaky: test_flaky.py::test_clock"], run.stdout
    assert (tmp_path / "clock").read_text() == "runrun"
    assert run.returncode == bool(unit)
    assert not unit or (tmp_path / "unit").read_text() == "run"
