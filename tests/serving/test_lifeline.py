"""What the library starts ends with it, however it ends: its caller is killed, and nobody is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from tests.harness.open_files import ends, is_there

STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN) if sys.argv[1] == "deaf" else None
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], start_new_session=True)
print(os.getpid(), child.pid, flush=True)
time.sleep(600)
"""
CALLER = """
import subprocess, sys
from verl import lifeline
program = subprocess.Popen(lifeline.guarded([sys.executable, "-S", "-c", sys.argv[1], sys.argv[2]]))
program.wait()
"""


@pytest.mark.parametrize("kind", ["listening", "deaf"])
def test_a_program_and_what_it_started_in_a_session_of_its_own_end_when_the_caller_is_killed(kind, record_property):
    caller = subprocess.Popen([sys.executable, "-c", CALLER, STUBBORN, kind], stdout=subprocess.PIPE, text=True)
    pids = [int(word) for word in caller.stdout.readline().split()]
    assert len(pids) == 2 and all(is_there(pid) for pid in pids)
    os.kill(caller.pid, signal.SIGKILL)
    killed = time.monotonic()
    caller.wait()
    assert ends(pids)
    record_property("noticed_seconds", time.monotonic() - killed)


def test_its_standard_input_and_status_are_the_programs():
    from verl import lifeline

    program = "import sys; print(sys.stdin.read().upper()); sys.exit(7)"
    done = subprocess.run(lifeline.guarded([sys.executable, "-S", "-c", program]), input="abc", text=True,
                          capture_output=True, check=False)  # fmt: skip
    assert (done.stdout, done.returncode) == ("ABC\n", 7)


def test_a_closed_program_leaves_no_pipe_and_no_reader():
    from verl import lifeline

    program = lifeline.ChildProgram([sys.executable, "-S", "-c", "input()"], dict(os.environ), "a reader of lines")
    reader = f"output of {program.name}"
    program.close()
    assert program.process.stdin.closed and program.process.stdout.closed
    assert reader not in {thread.name for thread in threading.enumerate()}


ORPHAN = """
import subprocess, sys, time
child = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)'], \
stdout=subprocess.DEVNULL).pid, flush=True)"
subprocess.run([sys.executable, "-S", "-c", child], check=True)
time.sleep(600)
"""


def test_an_orphan_that_ends_before_the_program_is_gone_and_no_zombie():
    from verl import lifeline

    command = lifeline.guarded([sys.executable, "-S", "-c", ORPHAN])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as guard:
        orphan = psutil.Process(int(guard.stdout.readline()))
        orphan.kill()
        assert psutil.wait_procs([orphan], timeout=60)[1] == []
        assert guard.poll() is None
        guard.terminate()
        assert guard.wait(60) == 128 + signal.SIGTERM


LEAVES_PROCESSES = """
import multiprocessing, subprocess, sys, time
from verl import lifeline, terminal

def start(*more):
    program = "import sys; sys.path.pop(); print(flush=True); sys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-S", "-c", program, *more], stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE, start_new_session=True)
    child.stdout.readline()
    return child.pid

if __name__ == "__main__":
    earlier = start("earlier")
    lifeline.end_leftovers_at_exit(terminal.tell)
    daemon = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), daemon=True)
    daemon.start()
    print(earlier, start("the server of an environment"), daemon.pid, flush=True)
    sys.exit(3)
"""


def test_a_run_ends_what_its_code_has_started_and_names_it(tmp_path):
    (tmp_path / "run.py").write_text(LEAVES_PROCESSES)
    done = subprocess.run([sys.executable, tmp_path / "run.py"], text=True, capture_output=True, check=False)
    earlier, server, daemon = map(int, done.stdout.split())
    assert done.returncode == 3 and ends([server, daemon])
    assert done.stderr.startswith("processes that the run's code has started are ended with it: ")
    assert f" {server} (" in done.stderr and str(daemon) not in done.stderr and str(earlier) not in done.stderr
