"""Hostile programs and signals, locks and leases: nothing outside is killed, held up or made to wait.

Run as on a kernel whose Landlock has no signal scopes (before 6.12), where no other wall may be leaned on, too.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.sandboxes import MODES, NEWEST_LANDLOCK, OFFERED, arguments
from tests.sandbox.attacks import Box
from verl.sandbox import Pool, process

BEFORE_SCOPES = min(5, NEWEST_LANDLOCK)
SHARED_FILE = json.__file__


@pytest.fixture(scope="module", params=OFFERED)
def old(request: pytest.FixtureRequest) -> Iterator[Box]:
    """The sandbox of a kernel without signal scopes."""
    given = {**arguments(request.param), "newest_landlock": BEFORE_SCOPES}
    with Pool(1, **given) as pool:
        yield Box(pool, MODES[request.param], given)


@pytest.fixture
def victim() -> Iterator[subprocess.Popen]:
    """A process of the user as whom programs run."""
    nobody = {"user": 65534} if os.geteuid() == 0 else {}
    with subprocess.Popen([shutil.which("sleep") or "sleep", "600"], start_new_session=True, **nobody) as process:
        yield process
        process.kill()


@pytest.fixture
def own() -> Iterator[subprocess.Popen]:
    """A process of this user."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True) as process:
        yield process
        process.kill()


SIGIO = """
    import fcntl, os, struct
    r, w = os.pipe()
    {own}
    fcntl.fcntl(r, 10, 9)
    {watch}
    os.write(w, b"x")
    """
FLAGS = "fcntl.fcntl(r, fcntl.F_SETFL, fcntl.fcntl(r, fcntl.F_GETFL) | os.O_ASYNC)"
WAYS = {
    "F_SETOWN": ("fcntl.fcntl(r, 8, {pid})", FLAGS),
    "F_SETOWN of a group": ("fcntl.fcntl(r, 8, -{group})", FLAGS),
    "F_SETOWN_EX": ("fcntl.fcntl(r, 15, struct.pack('ii', 1, {pid}))", FLAGS),
    "FIOSETOWN": ("fcntl.ioctl(r, 0x8901, struct.pack('i', {pid}))", "fcntl.ioctl(r, 0x5452, struct.pack('i', 1))"),
}


def test_no_process_of_the_same_user_is_killed_by_a_descriptors_signal(old: Box, victim, own):
    if "seccomp" in old.missing and BEFORE_SCOPES:
        return  # namespaces hide all other processes there, and are tried by the test below
    tries = {}
    for target in (victim, own):
        for name, (owner, watch) in WAYS.items():
            given = owner.format(pid=target.pid, group=os.getpgid(target.pid))
            tries[f"{name} {target.pid}"] = SIGIO.format(own=given, watch=watch)
    old.none_gets_through(tries)
    assert victim.poll() is None and own.poll() is None


def test_no_process_of_the_same_user_is_killed_without_the_filter_either(old: Box, victim, own):
    code = "\n".join(
        f"try:\n {line}\nexcept Exception: pass"
        for target in (victim, own)
        for line in (
            f"import fcntl, os; r, w = os.pipe(); fcntl.fcntl(r, 8, {target.pid}); fcntl.fcntl(r, 10, 9); "
            "fcntl.fcntl(r, 4, os.O_ASYNC); os.write(w, b'x')",
            f"os.kill({target.pid}, 9)",
        )
    )
    old.run("import os\n" + code)
    assert victim.poll() is None and own.poll() is None
    assert old.run("print('still served')").stdout == "still served\n"


def test_no_signal_ends_or_stops_the_first_process_of_a_run(old: Box):
    code = """
        import os, signal
        for number in range(1, 65):
            for send in (os.kill, getattr(signal, "tgkill", os.kill)):
                try:
                    send(1, number)
                except OSError:
                    pass
        print("after")
        """
    assert old.run(code).stdout == "after\n"


def test_not_even_a_handler_of_a_preloaded_package_lets_a_signal_through(monkeypatch: pytest.MonkeyPatch):
    if "whole" not in OFFERED:
        return
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        folder.chmod(0o755)
        (folder / "catcher.py").write_text(
            "import faulthandler, os, signal\n"
            "signal.signal(signal.SIGTERM, lambda *_: os._exit(3))\n"
            "signal.signal(signal.SIGUSR2, lambda *_: os._exit(3))\n"
        )
        monkeypatch.setattr(process, "_package_folders", lambda: [str(folder)])
        with Pool(1, preload=["catcher"], **{**arguments("whole"), "newest_landlock": BEFORE_SCOPES}) as pool:
            code = "import os\nfor n in (15, 12, 2):\n try: os.kill(1, n)\n except OSError: pass\nprint('after')"
            assert pool.run(code).stdout == "after\n"
    finally:
        shutil.rmtree(folder)


def test_interrupting_oneself_is_a_keyboard_interrupt_as_ever(box: Box):
    outcome = box.run(
        "import os, signal\ntry: os.kill(os.getpid(), signal.SIGINT)\nexcept KeyboardInterrupt: print('k')"
    )
    assert outcome.stdout == "k\n"


LOCKS = {
    "flock": "fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)",
    "flock to read": "fcntl.flock(file, fcntl.LOCK_SH)",
    "record lock": "fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)",
    "record lock that waits": "fcntl.lockf(file, fcntl.LOCK_SH)",
    "lock of the open file": "fcntl.fcntl(file, 37, __import__('struct').pack('hhqqi4x', 0, 0, 0, 0, 0))",
    "lease": "fcntl.fcntl(file, 1024, fcntl.F_RDLCK)",
    "notice of a folder": "fcntl.fcntl(os.open(os.path.dirname(file.name), os.O_RDONLY), 1026, 0x2f)",
}


def test_no_lock_or_lease_on_a_file_of_this_machine_can_be_had(box: Box):
    if "seccomp" in box.missing:
        return
    box.none_gets_through(
        {name: f"import fcntl, os; file = open({SHARED_FILE!r}, 'rb'); got = {call}" for name, call in LOCKS.items()}
    )


def test_a_library_can_be_locked_here_while_a_program_tries_to_hold_it(box: Box):
    if "seccomp" in box.missing:
        return
    from verl.sandbox import Session

    with Session(box.pool) as session, open(SHARED_FILE, "rb") as file:
        session.run(f"import fcntl\nfile = open({SHARED_FILE!r}, 'rb')\nfcntl.flock(file, fcntl.LOCK_EX)")
        session.run("fcntl.lockf(file, fcntl.LOCK_SH)")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_flags_and_copies_of_descriptors_work(box: Box):
    code = """
        import fcntl, os
        r, w = os.pipe()
        os.set_blocking(r, False)
        print(os.get_blocking(r), fcntl.fcntl(os.dup(w), fcntl.F_GETFD), fcntl.fcntl(w, fcntl.F_DUPFD, 20))
        """
    assert box.run(code).stdout == "False 1 20\n"


def test_a_database_in_a_file_works_when_it_is_told_to_take_no_locks(box: Box):
    code = """
        import sqlite3
        base = sqlite3.connect("file:x.db?nolock=1", uri=True)
        base.execute("create table t (a)"), base.execute("insert into t values (7)"), base.commit()
        print(base.execute("select a from t").fetchall())
        """
    assert box.run(code).stdout == "[(7,)]\n"


def test_a_crash_is_not_handed_to_a_program_of_this_machine(box: Box):
    """Where crashes are piped to a handler, a limit of 0 does not keep the kernel from starting it; 1 does."""
    assert box.run("import resource; print(resource.getrlimit(resource.RLIMIT_CORE))").stdout == "(1, 1)\n"
    assert box.run("import os; os.abort()").signal == signal.SIGABRT
