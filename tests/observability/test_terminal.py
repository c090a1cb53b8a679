"""Nobody reads what a process prints any more: it continues, keeps its words in a file, and says so once."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.programs import PROJECT

LOST = """
import sys
from verl.terminal import outlive, tell
outlive(sys.argv[1])
print("before", flush=True)
sys.stdin.readline()
for number in range(3):
    print("out", number, flush=True)
    print("err", number, file=sys.stderr)
tell("told")
"""
STOPPING = """
import signal, sys, time
from verl.trainer.signals import StopSignals
with StopSignals() as stop:
    print("ready", flush=True)
    sys.stdin.readline()
    sys.exit(stop.stopped("saved")) if stop.requested else print("not stopped")
"""


def started(code: str, *words: str, hup=signal.SIG_DFL, **streams: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *words],
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
        text=True,
        stdin=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, hup),  # noqa: PLW1509 -- one call, no lock
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams},
    )


def test_what_is_printed_after_a_closed_pipe_is_in_the_file(tmp_path):
    process = started(LOST, str(tmp_path / "run/output.txt"))
    assert process.stdout.readline() == "before\n"
    process.stdout.close()
    process.stdin.write("\n")
    process.stdin.close()
    said = process.stderr.read()
    assert process.wait(60) == 0
    assert (tmp_path / "run/output.txt").read_text() == "out 0\nout 1\nout 2\n"
    first, *rest = said.splitlines()
    assert first.startswith("standard output is closed (Broken pipe): the run continues") and "output.txt" in first
    assert rest == ["err 0", "err 1", "err 2", "told"]


def test_a_terminal_that_hangs_up_takes_no_line_with_it(tmp_path):
    terminal, side = pty.openpty()
    process = started(LOST, str(tmp_path / "output.txt"), stdout=side, stderr=side)
    os.close(side)
    with open(terminal, "rb", buffering=0) as screen:
        assert screen.readline() == b"before\r\n"
    process.communicate("\n", timeout=60)
    assert process.returncode == 0
    lines = (tmp_path / "output.txt").read_text().splitlines()
    printed = [line for line in lines if "closed" not in line]
    assert printed == ["out 0", "err 0", "out 1", "err 1", "out 2", "err 2", "told"]
    assert [line.partition(" (")[0] for line in lines if "closed" in line] == [
        "standard error is closed",
        "standard output is closed",
    ]


def test_where_no_file_can_be_written_the_process_continues_and_says_so(tmp_path):
    (tmp_path / "file").touch()
    process = started(LOST, str(tmp_path / "file/output.txt"))
    process.stdout.readline()
    process.stdout.close()
    process.stdin.write("\n")
    process.stdin.close()
    assert "what it prints from now on is lost" in process.stderr.read()
    assert process.wait(60) == 0


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (["SIGHUP"], 129),
        (["SIGHUP", "SIGHUP"], 129),  # the shell and the kernel send one each
        (["SIGTERM", "SIGHUP"], 143),  # the end of a login session sends both
        (["SIGHUP", "SIGTERM"], 129),
    ],
)
def test_a_hang_up_stops_in_order_and_never_counts_as_a_second_signal(sent, status):
    process = started(STOPPING)
    process.stdout.readline()
    for number, name in enumerate(sent):
        process.send_signal(getattr(signal, name))
        if name == "SIGTERM" or not number:
            assert process.stderr.readline().startswith(f"{name}: the run saves and stops")
    _, said = process.communicate("\n", timeout=60)
    assert (process.returncode, said) == (status, f"{sent[0]}: saved\n")


def test_a_second_signal_that_is_no_hang_up_still_ends_it_at_once():
    process = started(STOPPING)
    process.stdout.readline()
    for name in ("SIGHUP", "SIGINT", "SIGTERM"):
        process.send_signal(getattr(signal, name))
        assert name in process.stderr.readline()
    assert process.wait(60) == 143


def test_under_nohup_a_hang_up_stays_ignored():
    process = started(STOPPING, hup=signal.SIG_IGN)
    process.stdout.readline()
    process.send_signal(signal.SIGHUP)
    out, said = process.communicate("\n", timeout=60)
    assert (process.returncode, out, said) == (0, "not stopped\n", "")


def test_a_print_of_a_reward_function_outlives_the_terminal_of_its_run(tmp_path):
    from verl.rewards import wire
    from verl.sandbox import frames

    Path(tmp_path / "scorer.py").write_text(
        "import sys\ndef compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    print('scoring', solution_str)\n    print('scoring', file=sys.stderr)\n    return 1.0\n"
    )
    reader, writer = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", "from verl.rewards.worker import main; main()"],
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=writer,
    )
    os.close(reader)
    os.close(writer)
    origin = {"origin": str(tmp_path / "scorer.py"), "name": "compute_score"}
    limits = {"timeout": 60.0, "memory_mb": None, "cpu_seconds": None}
    for message in ({**origin, "reward_kwargs": wire.to_plain({}), **limits}, wire.pack_samples([sample()])):
        process.stdin.write(frames.pack(message))
    process.stdin.close()
    started, scored = frames.read(process.stdout.fileno())
    (result,) = wire.unpack_results(scored)
    assert started == {"failure": None}
    assert (result.score, result.failure) == (1.0, None)
    assert process.wait(60) == 0


def sample():
    from verl.rewards.samples import RewardSample

    return RewardSample("letters", "abc", "b", {})


def test_a_process_that_ends_itself_at_once_says_where(tmp_path):
    code = "import os\nfrom verl.terminal import say_exits\nsay_exits()\nsay_exits()\n"
    code += "os.fork() or os._exit(0)\nos.wait()\nos._exit(7)\n"
    (tmp_path / "run.py").write_text(code)
    done = subprocess.run([sys.executable, tmp_path / "run.py"], text=True, capture_output=True, check=False)
    assert done.returncode == 7
    said = f"os._exit(7) was called ({tmp_path / 'run.py'}, line 7): the run ends here, and saves nothing\n"
    assert done.stderr == said
