"""Cells that share their variables."""

from __future__ import annotations

import socket
import time

import psutil
import pytest

from tests.harness.sandboxes import HERE, OFFERED, arguments
from tests.sandbox.attacks import Box, all_end, is_alive, keeper_processes, wait_until_quiet
from verl.errors import SandboxError
from verl.sandbox import Limits, Pool, Session


def test_variables_imports_and_files_stay_from_cell_to_cell(box: Box):
    with Session(box.pool) as session:
        assert session.run("import math\nx = 9\nopen('note', 'w').write('kept') and None").stdout == ""
        assert session.run("math.sqrt(x)").stdout == "3.0\n"
        assert session.run("print(open('note').read())").stdout == "kept\n"
        assert session.run("def f():\n    return x + 1").stdout == ""
        assert session.run("x = 20\nf()").stdout == "21\n"


def test_an_error_keeps_the_variables_and_shows_the_line(pool: Pool):
    with Session(pool) as session:
        session.run("x = 1")
        outcome = session.run("y = 2\n1 / 0")
        assert outcome.status == "error" and 'File "<cell 2>", line 2' in outcome.stderr
        assert "    1 / 0" in outcome.stderr and "verl" not in outcome.stderr
        assert session.run("x + y").stdout == "3\n"


def test_exit_ends_the_cell_and_not_the_session(pool: Pool):
    with Session(pool) as session:
        session.run("x = 1")
        assert session.run("import sys; sys.exit(3)").exit_code == 3
        assert session.run("x").stdout == "1\n"


@pytest.mark.parametrize(
    ("code", "status", "says"),
    [
        ("while True: pass", "timeout", "stopped after its 1.5 s"),
        ("import os; os._exit(0)", "ok", "it ended the interpreter"),
        ("print('x' * 200_000)", "output", "wrote more than 64 KB"),
        ("import ctypes; ctypes.string_at(0)", "crash", "killed by SIGSEGV"),
    ],
)
def test_a_cell_that_is_stopped_takes_the_variables_along_and_says_so(box: Box, code: str, status: str, says: str):
    with Session(box.pool, Limits(seconds=1.5 if status == "timeout" else 20)) as session:
        session.run("x = 1")
        outcome = session.run(code)
        assert outcome.status == status and says in outcome.detail
        assert outcome.detail.endswith("its variables and files are lost") and outcome.describe().endswith("lost")
        assert "NameError" in session.run("x").stderr
        assert session.run("1 + 1").stdout == "2\n"
    assert len(wait_until_quiet(box.pool)) == 2


def test_memory_of_a_cell_can_run_out_without_an_end_of_the_session(box: Box):
    with Session(box.pool) as session:
        assert session.run("x = 5").ok
        assert session.run("y = bytearray(10 << 30)").status == "memory"
        assert session.run("x").stdout == "5\n"


def seconds_of_processor(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def test_a_thread_does_no_work_between_cells(pool: Pool):
    work = "import threading, time\ndef work():\n    while True: pass\n"
    with Session(pool, Limits(seconds=20)) as session:
        session.run(work + "threading.Thread(target=work, daemon=True).start()")
        processes = [psutil.Process(pid) for pid in keeper_processes(pool)]
        before = seconds_of_processor(processes)
        time.sleep(0.5)
        assert seconds_of_processor(processes) - before < 0.1
        until_it_worked = "end = time.process_time() + 0.2\nwhile time.process_time() < end: time.sleep(0.01)"
        assert session.run(until_it_worked).ok, "it goes on with the next cell"


def test_many_cells_do_not_add_up_to_a_time_limit(pool: Pool):
    with Session(pool, Limits(seconds=2.0)) as session:
        for _ in range(8):
            assert session.run("import time\nend = time.time() + 0.3\nwhile time.time() < end: pass").ok


def test_closing_a_session_leaves_nothing_and_it_begins_anew(box: Box):
    session = Session(box.pool)
    session.run("x = 1")
    session.close()
    assert len(wait_until_quiet(box.pool, seconds=0.0)) == 2
    assert "NameError" in session.run("x").stderr
    session.close()


def test_the_process_of_a_session_ends_with_it_even_where_no_namespace_ends_it():
    if "without namespaces" not in OFFERED:
        return
    with Pool(1, **arguments("without namespaces")) as pool:
        sessions = [Session(pool) for _ in range(3)]
        pids = [int(session.run("import os; os.getpid()").stdout) for session in sessions]
        assert all(map(is_alive, pids))
        sessions[0].close()
        assert all_end({pids[0]}) and is_alive(pids[1])
        undo = "import ctypes; ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)"
        assert sessions[1].run(undo).stdout == "-1\n"
    assert all_end(set(pids))


def wait_for_the_end_of(session: Session) -> None:
    """Closing a pool kills its keeper, and the kernel then what the keeper started: the socket closes with the last."""
    connection = session._channel._socket
    connection.settimeout(60)
    assert connection.recv(1, socket.MSG_PEEK) == b""


def test_a_session_whose_pool_was_closed_tells_it_once_and_begins_anew():
    if "whole" not in OFFERED:
        return
    with Pool(1, **HERE) as pool, Session(pool) as session:
        session.run("x = 1")
        pool.close()
        wait_for_the_end_of(session)
        with pytest.raises(SandboxError, match="ended without an answer"):
            session.run("x")
        assert "NameError" in session.run("x").stderr
        pool.close()
        session.close()
        assert session.run("2").stdout == "2\n"


def test_a_forged_report_of_an_ended_cell_only_ends_it_early(pool: Pool):
    with Session(pool, Limits(seconds=20)) as session:
        session.run("1")
        outcome = session.run("import os; os.write(3, b'{\"cell\": 2, \"exit\": 0}\\n'); print('a', flush=True); 1 / 0")
        assert outcome.status == "ok"
        assert session.run("print('b')").stdout.endswith("b\n")


@pytest.mark.parametrize("code", ["", "# nothing", "x =", "\x00", "'\\ud800'", "print('\\ud800')", "await x"])
def test_cells_of_any_text_leave_the_session_alive(pool: Pool, code: str):
    with Session(pool) as session:
        session.run(code)
        assert session.run("2").stdout == "2\n"
