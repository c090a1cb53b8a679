"""What `make test` starts ends with it, however it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil

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
