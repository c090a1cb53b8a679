"""Hostile programs and resources: everything ends at its limit, and nothing is left of it."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from tests.harness.sandboxes import HERE
from tests.sandbox.attacks import Box, descendants, wait_until_quiet
from verl.sandbox import Limits, Outcome, Pool

ONLY_MODES = ("whole", "without namespaces")
"""Limits are kept in two ways; Landlock and seccomp have no part in it."""
SECONDS = 0.5
"""For programs that would go on for a minute or for ever."""
PLENTY = 20.0
"""For programs that come to another limit than time."""
BUSY_MACHINE = 6.0
"""What a loaded machine may add from the caller's view: to get to the program, and to bury it."""


def ended_in_time(outcome: Outcome, seconds: float = SECONDS) -> bool:
    return outcome.seconds <= seconds + 1.0


def run_and_bury(box: Box, code: str, **limits: float) -> Outcome:
    """The outcome, after it is sure that it came in time and that no process is left."""
    limits = {"seconds": SECONDS, **limits}
    begin = time.monotonic()
    outcome = box.run(code, **limits)
    assert time.monotonic() - begin < limits["seconds"] + 1 + BUSY_MACHINE
    assert ended_in_time(outcome, limits["seconds"]), outcome
    assert len(wait_until_quiet(box.pool, seconds=0.0)) == 2
    return outcome


def test_an_endless_loop_is_ended(box: Box):
    outcome = run_and_bury(box, "while True: pass")
    assert (outcome.status, outcome.detail) == ("timeout", "stopped after its 0.5 s")


def test_a_program_that_sleeps_is_ended(box: Box):
    assert run_and_bury(box, "import time; time.sleep(60)").status == "timeout"


def test_a_program_that_ignores_all_signals_is_ended(box: Box):
    code = """
        import signal
        for number in range(1, 65):
            try:
                signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError):
                pass
        while True: pass
        """
    assert run_and_bury(box, code).status == "timeout"


def test_a_loop_in_c_that_never_returns_to_python_is_ended(box: Box):
    assert run_and_bury(box, "import re; re.match(r'(a+)+$', 'a' * 60 + 'b')").status == "timeout"


def test_a_fork_bomb_is_ended(box: Box):
    code = """
        import os
        while True:
            try:
                os.fork()
            except OSError:
                pass
        """
    assert run_and_bury(box, code).status in ("timeout", "error")


def test_a_thread_bomb_is_ended(box: Box):
    code = """
        import threading, time
        while True:
            try:
                threading.Thread(target=time.sleep, args=(60,)).start()
            except RuntimeError:
                time.sleep(0.01)
        """
    assert run_and_bury(box, code).status in ("timeout", "memory")


def test_ten_gigabytes_are_not_given(box: Box):
    outcome = run_and_bury(box, "x = bytearray(10 << 30)", seconds=PLENTY)
    assert outcome.status == "memory"
    assert outcome.stderr.endswith("MemoryError\n")


def test_memory_that_grows_is_ended_at_its_limit(box: Box):
    outcome = run_and_bury(box, "x = []\nwhile True: x.append(bytearray(1 << 20))", seconds=PLENTY, memory_mb=128)
    assert outcome.status == "memory"


@pytest.mark.needs_layers("namespaces")
def test_the_memory_of_several_processes_is_counted_together(pool: Pool):
    code = """if True:
        import os, time
        for _ in range(6):
            if os.fork() == 0:
                x = bytearray(80 << 20)
                time.sleep(60)
        time.sleep(60)
        """
    outcome = pool.run(code, limits=Limits(seconds=PLENTY, memory_mb=200))
    assert outcome.status == "memory" and outcome.seconds < 8, outcome


def test_a_ten_gigabyte_file_does_not_fit(box: Box):
    code = """
        import os
        with open("big", "wb", buffering=0) as file:
            for _ in range(10_000):
                file.write(bytes(1 << 20))
        """
    outcome = run_and_bury(box, code, disk_mb=16, seconds=PLENTY)
    assert outcome.status == "error" and ("No space left" in outcome.stderr or "File too large" in outcome.stderr)


@pytest.mark.needs_layers("namespaces")
def test_many_files_do_not_fill_the_disk(pool: Pool):
    code = """if True:
        import os
        made = 0
        try:
            while True:
                with open(f"f{made}", "wb") as file:
                    file.write(bytes(1 << 16))
                made += 1
        except OSError as error:
            print(made < 1000, error.strerror)
        """
    assert pool.run(code, limits=Limits(seconds=PLENTY, disk_mb=16)).stdout == "True No space left on device\n"


def test_a_flood_of_output_is_cut_and_ended(box: Box):
    outcome = run_and_bury(box, "while True: print('x' * 10000)", output_kb=32, seconds=PLENTY)
    assert outcome.status == "output" and len(outcome.stdout) == 32 * 1024
    assert outcome.detail == "stopped because it wrote more than 32 KB"


def test_a_flood_on_standard_error_and_on_the_report_is_cut_too(box: Box):
    for fd in (2, 3):
        code = f"import os\nwhile True: os.write({fd}, b'x' * 10000)"
        assert run_and_bury(box, code, seconds=PLENTY).status == "output"


def test_too_many_open_files_are_refused(box: Box):
    outcome = run_and_bury(box, "x = []\nwhile True: x.append(open('/dev/null'))", open_files=32, seconds=PLENTY)
    assert "Too many open files" in outcome.stderr


@pytest.mark.needs_layers("namespaces")
def test_a_daemon_does_not_outlive_its_program(pool: Pool):
    code = """if True:
        import os, signal, time
        if os.fork() == 0:
            os.setpgid(0, 0)
            if os.fork() == 0:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                signal.signal(signal.SIGHUP, signal.SIG_IGN)
                time.sleep(600)
            os._exit(0)
        print("started", flush=True)
        """
    outcome = pool.run(code)
    assert (outcome.status, outcome.stdout) == ("ok", "started\n")
    assert len(wait_until_quiet(pool, seconds=0.0)) == 2


@pytest.mark.needs_layers("namespaces")
def test_a_child_that_holds_the_output_open_does_not_delay_the_outcome(pool: Pool):
    outcome = pool.run("import os, time\nif os.fork() == 0: time.sleep(600)\nprint('x')", limits=Limits(seconds=PLENTY))
    assert outcome.status == "ok" and outcome.seconds < 10


def test_stopping_itself_does_not_hold_up_the_limit(pool: Pool):
    outcome = pool.run("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", limits=Limits(seconds=SECONDS))
    assert outcome.status == "timeout" and ended_in_time(outcome)


def test_the_tree_of_processes_below_a_bomb_stays_small_while_it_runs(pool: Pool):
    pool.prepare()
    most = 0
    thread = threading.Thread(
        target=pool.run,
        args=(
            "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass",
            "",
            Limits(seconds=3 * SECONDS, processes=8),
        ),
    )
    thread.start()
    while thread.is_alive():
        most = max(most, len(descendants(pool._keepers[-1].pid)))
        time.sleep(0.02)
    assert 3 <= most <= 8 + 4


def test_other_programs_go_on_beside_hostile_ones():
    with Pool(4, **HERE) as pool:
        pool.prepare()
        bomb = "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass"
        threads = [
            threading.Thread(target=pool.run, args=(code, "", Limits(seconds=1.5)))
            for code in (bomb, "while True: pass")
        ]
        for thread in threads:
            thread.start()
        outcomes = [pool.run(f"print({i} * 2)", limits=Limits(seconds=PLENTY)) for i in range(5)]
        assert [outcome.stdout for outcome in outcomes] == [f"{2 * i}\n" for i in range(5)]
        for thread in threads:
            thread.join(60)
        assert len(wait_until_quiet(pool)) == 2


@pytest.mark.parametrize("mb", [64, 256])
def test_a_program_gets_the_memory_that_it_was_promised(box: Box, mb: int):
    assert box.run(f"x = bytearray({mb - 16} << 20); print(len(x))", memory_mb=mb).status == "ok"


def test_no_core_file_is_written(box: Box):
    before = set(Path.cwd().glob("core*"))
    outcome = box.run("import os; os.abort()")
    assert outcome.status == "crash" and set(Path.cwd().glob("core*")) == before
