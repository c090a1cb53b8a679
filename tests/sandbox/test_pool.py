"""What a program gets and gives: input, output, exit codes, limits, and the pool's own life."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from tests.harness.sandboxes import HERE
from tests.sandbox.attacks import Box, all_end, descendants, keeper_processes, wait_until_quiet
from verl.errors import ConfigError, SandboxError
from verl.sandbox import Limits, Pool, Session, process

ROOT = Path(__file__).resolve().parents[2]


def test_a_program_reads_its_input_and_its_output_comes_back(box: Box):
    outcome = box.run("print(input()[::-1])\nimport sys\nprint('aside', file=sys.stderr)", stdin="abc\n")
    assert (outcome.status, outcome.stdout, outcome.stderr, outcome.exit_code) == ("ok", "cba\n", "aside\n", 0)
    assert outcome.ok and outcome.signal is None and outcome.detail == ""


def test_a_large_input_and_output_arrive_whole(box: Box):
    text = "".join(f"{i}\n" for i in range(40_000))
    outcome = box.pool.run("import sys; sys.stdout.write(sys.stdin.read())", text, Limits(output_kb=1024))
    assert outcome.stdout == text


def test_an_input_that_nobody_reads_does_no_harm(box: Box):
    assert box.run("print('done')", stdin="x" * 1_000_000).stdout == "done\n"


@pytest.mark.parametrize(
    ("code", "exit_code", "said"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('why')", 1, "why\n"),
        ("raise SystemExit", 0, ""),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("def (", 1, "SyntaxError: invalid syntax\n"),
        ("import os; os._exit(7)", 7, ""),
        ("x = 1\x00", 1, "null bytes\n"),
    ],
)
def test_exit_codes_and_errors_are_those_of_an_interpreter(pool: Pool, code: str, exit_code: int, said: str):
    outcome = pool.run(code)
    assert outcome.exit_code == exit_code
    assert outcome.stderr.endswith(said)
    assert outcome.status == ("ok" if exit_code == 0 else "error")


@pytest.mark.needs_layers("namespaces")
def test_a_traceback_shows_the_programs_own_lines_only(pool: Pool):
    outcome = pool.run("def f():\n    return 1 / 0\n\nf()\n")
    assert outcome.stderr.startswith('Traceback (most recent call last):\n  File "/tmp/main.py", line 4, in <module>\n')
    assert "return 1 / 0" in outcome.stderr and "verl" not in outcome.stderr


def test_threads_exit_functions_and_buffers_end_as_in_an_interpreter(box: Box):
    outcome = box.run(
        """
        import atexit, threading, sys
        atexit.register(lambda: print("last"))
        main = threading.main_thread()
        threading.Thread(target=lambda: (main.join(), print("thread"))).start()
        sys.stdout.write("first\\n")
        """
    )
    assert outcome.stdout == "first\nthread\nlast\n"


def test_a_crash_is_told_by_its_signal(box: Box):
    outcome = box.run("import ctypes; ctypes.string_at(0)")
    assert (outcome.status, outcome.signal, outcome.exit_code) == ("crash", signal.SIGSEGV, None)
    assert outcome.detail == "killed by SIGSEGV"


def test_output_that_is_not_text_is_replaced_and_never_an_error(box: Box):
    outcome = box.run("import sys; sys.stdout.buffer.write(b'a\\xff\\x00b')")
    assert outcome.stdout == "a�\x00b"


def test_a_program_finds_its_own_small_environment_and_an_empty_folder(box: Box, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_API_KEY", "secret-of-the-host")
    with Pool(1, **box.arguments) as pool:
        outcome = pool.run("import os; print(sorted(os.environ)); print(os.listdir('.')); print(os.getcwd())")
    names, files, folder = outcome.stdout.splitlines()
    assert names == "['HOME', 'LANG', 'OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'PYTHONHASHSEED']"
    assert files == "['main.py']"
    assert folder == "/tmp" or "namespaces" in box.missing


def test_installed_packages_can_be_imported_or_kept_away(pool: Pool):
    assert pool.run("import numpy; print(numpy.arange(3).sum())", limits=Limits(seconds=20)).stdout == "3\n"
    with Pool(1, packages=False, **HERE) as bare:
        assert "ModuleNotFoundError" in bare.run("import numpy").stderr


def test_what_is_preloaded_costs_a_program_nothing(pool: Pool):
    with Pool(1, preload=["fractions", "no_such_module"], **HERE) as warm:
        assert warm.run("import sys; print('fractions' in sys.modules)").stdout == "True\n"
        assert warm._keepers[-1].not_preloaded.keys() == {"no_such_module"}
    assert pool.run("import sys; print('fractions' in sys.modules)").stdout == "False\n"


def test_the_order_of_sets_is_the_same_in_every_run():
    code = "print(list({'a', 'b', 'c', 'd', 'e', 'f'}))"
    with Pool(1, **HERE) as first, Pool(1, **HERE) as second:
        assert first.run(code).stdout == second.run(code).stdout


def test_programs_run_side_by_side_but_no_more_than_there_are_places():
    with Pool(3, **HERE) as pool:
        pool.run("pass")
        spans: list[tuple[float, float]] = []

        def work() -> None:
            outcome = pool.run("import time; print(time.time()); time.sleep(0.8); print(time.time())")
            begin, end = map(float, outcome.stdout.split())
            spans.append((begin, end))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(spans) == 4
    at_once = [sum(begin <= moment <= end for begin, end in spans) for moment, _ in spans]
    assert 2 <= max(at_once) <= 3


def test_a_pool_whose_keeper_was_killed_starts_a_new_one():
    with Pool(1, **HERE) as pool:
        pool.run("pass")
        before = keeper_processes(pool)
        os.kill(pool._keepers[-1].pid, signal.SIGKILL)
        pool._keepers[-1]._process.wait(60)
        assert pool.run("print('again')").stdout == "again\n"
        assert not before & keeper_processes(pool)


def test_closing_a_pool_ends_all_its_processes():
    pool = Pool(1, **HERE)
    session = Session(pool)
    session.run("x = 1")
    processes = keeper_processes(pool)
    assert len(processes) == 4  # watcher, keeper, init, program
    pool.close()
    assert all_end(processes)


def test_when_the_caller_is_killed_nothing_of_its_pool_is_left():
    code = (
        "import time, threading; from verl.sandbox import Pool\n"
        f"pool = Pool(2, **{HERE}); pool.run('pass')\n"
        "threading.Thread(target=lambda: pool.run('while 1: pass')).start()\n"
        "print('ready', flush=True); time.sleep(600)"
    )
    caller = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert caller.stdout is not None and caller.stdout.readline() == "ready\n"
    while len(below := descendants(caller.pid)) < 4:  # watcher, keeper, init, program
        assert caller.poll() is None
        time.sleep(0.02)
    caller.kill()
    caller.wait()
    assert all_end(below)
    caller.stdout.close()


def test_a_pool_outlives_the_thread_that_started_it():
    with Pool(1, **HERE) as pool:
        thread = threading.Thread(target=pool.prepare)
        thread.start()
        thread.join()
        time.sleep(0.1)
        before = pool._keepers[-1].pid
        assert pool.run("print('alive')").stdout == "alive\n"
        assert pool._keepers[-1].pid == before


def test_a_caller_that_forks_gets_a_pool_of_its_own_in_the_child(pool: Pool):
    pool.run("pass")
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, pool.run("print('from the child')").stdout.encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        assert pipe.read() == "from the child\n"
    os.waitpid(child, 0)
    assert pool.run("print('still here')").stdout == "still here\n"


def test_nothing_of_a_run_is_left_when_its_outcome_is_there(pool: Pool):
    pool.run("import os\nfor _ in range(3):\n    os.fork()\nimport time; time.sleep(0.05)")
    assert len(wait_until_quiet(pool, seconds=0.0)) == 2


def test_many_runs_leave_no_descriptor_open_and_no_memory_in_the_keeper():
    with Pool(4, **HERE) as pool:
        pool.run("pass")
        keeper = max(keeper_processes(pool) - {pool._keepers[-1].pid})

        def state() -> tuple[int, int]:
            return len(os.listdir("/proc/self/fd")), len(os.listdir(f"/proc/{keeper}/fd"))

        before = state()
        codes = [
            "pass",
            "1 / 0",
            "import os; os._exit(3)",
            "print('x' * 100_000)",
            "import ctypes; ctypes.string_at(0)",
        ]

        def work() -> None:
            for code in codes:
                pool.run(code)
                with Session(pool) as session:
                    session.run(code)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert state() == before


@pytest.mark.parametrize("given", [{"seconds": 0}, {"memory_mb": -1}, {"processes": True}, {"disk_mb": 1.5}])
def test_limits_that_make_no_sense_are_refused(given: dict):
    with pytest.raises(ConfigError, match="sandbox limit"):
        Limits(**given)


def test_packages_that_lie_below_the_machines_temporary_folder_are_found(monkeypatch):
    """A program's own /tmp hides the machine's, in which an environment may live."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        folder.chmod(0o755)  # a program is nobody
        (folder / "greeting.py").write_text("word = 'good day'\n")
        monkeypatch.setattr(process, "_package_folders", lambda: [str(folder)])
        with Pool(1, packages=True, **HERE) as pool:
            assert pool.run("import greeting; print(greeting.word)").stdout == "good day\n"
            assert "greeting" not in pool.run("import os; print(os.listdir('/tmp'))").stdout
    finally:
        shutil.rmtree(folder)


@pytest.mark.needs_layers("namespaces")
def test_programs_and_folders_are_there_only_where_they_are_named(pool):
    look = "import os; print([os.path.exists(name) for name in ('/usr/bin/env', '/app')])"
    use = "import os, subprocess; os.mkdir('/tmp/app'); open('/app/x', 'w')\nprint(subprocess.call('/usr/bin/true'))\n"
    assert pool.run(look).stdout == "[False, False]\n"
    with Pool(1, programs=["/usr/bin"], folders=["/app"], **HERE) as other:
        assert other.run(use + look).stdout == "0\n[True, True]\n"
        assert other.run("open('/usr/bin/env', 'a')").status == "error"


@pytest.mark.needs_layers("namespaces")
@pytest.mark.parametrize("folder, path", [("/usr", "/usr/"), ("/dev", "/dev/null"), ("/tmp", "/tmp")])
def test_a_folder_whose_place_is_taken_is_refused_with_the_path(folder, path):
    with Pool(1, folders=[folder], **HERE) as pool, pytest.raises(SandboxError, match=f"{folder} is not.* see {path}"):
        pool.prepare()


@pytest.mark.parametrize("folder", ["app", "/app/data", "/..", "/"])
def test_a_folder_that_is_no_name_in_the_root_is_refused(folder):
    with pytest.raises(ConfigError, match="no name in the root"):
        Pool(1, folders=[folder])


def test_folders_without_the_layer_namespaces_are_refused():
    with pytest.raises(ConfigError, match="without the layer namespaces there is no root"):
        Pool(1, folders=["/app"], allow_missing=["namespaces"])
