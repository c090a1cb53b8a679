"""What `make test` starts ends with it, however it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

GUARD = Path(__file__).parents[2] / "scripts" / "run_to_the_end.py"

# Starts a process in a session of its own, whose parent has ended, and prints its number; then waits, or ends.
FAMILY = """
import subprocess, sys, time
child = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], \
start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL); print(p.pid, flush=True)"
subprocess.run([sys.executable, "-c", child], check=True)
{then}
"""


def start(then: str) -> tuple[subprocess.Popen, psutil.Process]:
    """The guarded command, and the orphan below it."""
    command = [sys.executable, GUARD, "--grace", "0.1", sys.executable, "-c", FAMILY.format(then=then)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    return process, psutil.Process(int(process.stdout.readline()))


def gone(process: psutil.Process) -> bool:
    """Whether the process ends; one that is never killed sleeps for ten minutes."""
    return psutil.wait_procs([process], timeout=60)[1] == []


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted on Linux only")
def test_orphans_in_sessions_of_their_own_end_when_the_one_who_started_the_tests_is_killed() -> None:
    process, orphan = start(then="time.sleep(600)")
    process.stdin.close()  # what happens when the caller is killed
    assert gone(orphan)
    assert process.wait(60) == 143


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted on Linux only")
def test_what_a_command_leaves_behind_is_killed_and_named_and_its_status_kept() -> None:
    process, orphan = start(then="sys.exit(3)")
    assert process.wait(60) == 3
    assert f"left behind, killed: {orphan.pid} " in process.stderr.read().decode()
    assert gone(orphan)


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted on Linux only")
def test_an_adopted_process_that_ends_is_gone_while_the_command_goes_on() -> None:
    process, orphan = start(then="time.sleep(600)")
    orphan.kill()
    assert gone(orphan)
    assert process.poll() is None
    process.stdin.close()
    assert process.wait(60) == 143


def test_a_killed_run_of_the_suite_leaves_no_pytest_behind(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    os.mkfifo(ready)
    sleeper = tmp_path / "test_sleeper.py"
    sleeper.write_text(f"import time\ndef test_sleep():\n    open({str(ready)!r}, 'w').close()\n    time.sleep(600)\n")
    run = subprocess.Popen([sys.executable, GUARD.with_name("run_tests.py"), str(sleeper)], stdout=subprocess.DEVNULL)
    ready.read_text()  # waits for the test to begin
    family = psutil.Process(run.pid).children(recursive=True)
    run.kill()
    assert len(family) >= 3  # the guard, pytest and the worker that sleeps
    assert psutil.wait_procs(family, timeout=60)[1] == []
