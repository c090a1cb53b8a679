"""The page that a run starts: its link is in a private file, it ends with the run, and a failure is a notice."""

from __future__ import annotations

import os
import pty
import re
import stat
import subprocess
import sys
import threading
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

import psutil
import pytest

from tests.harness.runs import prepare, train
from tests.harness.waiting import HANGS, wait_until
from tests.viewer.recorded_runs import RecordedRun
from tests.viewer.served import Site
from verl.metrics import notices, reset_notices
from verl.trainer import runtime
from verl.viewer.run_page import KEY, LINK, run_page

ADDRESS = re.compile(r"http://127\.0\.0\.1:(\d+)/\?token=([0-9a-f]{64})\n")


@pytest.fixture(autouse=True)
def _fresh():
    reset_notices()


def below(command: str) -> list[psutil.Process]:
    running = []
    for one in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile, also as a zombie
            running += [one] if command in " ".join(one.cmdline()) else []
    return running


def test_the_page_of_a_run_shows_it_and_ends_with_the_block(tmp_path, capsys):
    run, printed = RecordedRun(tmp_path / "run", steps=1), []
    elsewhere, file = tmp_path / "elsewhere", run.folder / LINK
    elsewhere.mkdir()
    file.write_text("of a run that was killed")
    file.chmod(0o644)
    with run_page(run.folder, run.folder / "metrics.jsonl", elsewhere):

        def line() -> str:
            printed.append(capsys.readouterr().out)
            return "".join(printed)

        wait_until(lambda: "\n" in line(), lambda: f"no link: {notices()}")
        assert line() == f"the page of this run: open the link in {file}\n", "no token, and nothing more"
        match = ADDRESS.fullmatch(file.read_text())
        assert match is not None and stat.S_IMODE(file.stat().st_mode) == 0o600
        site = Site(int(match[1]))
        assert site.send("/api/runs", token=match[2]).json["runs"][0]["last_step"] == 1
        pages = below("verl.viewer")
        assert pages and all(
            page.nice() == min(19, psutil.Process().nice() + 10)
            for page in pages
            if "lifeline" not in " ".join(page.cmdline())
        )
    assert not file.exists() and not below("verl.viewer") and not any(page.is_running() for page in pages)
    assert not notices()


SHOWS = """
import fcntl, io, sys, termios, threading
from pathlib import Path
from verl.viewer import run_page

fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # standard input controls this process
heard, shown = io.StringIO(), threading.Event()
show = run_page.show_at_terminal
run_page.show_at_terminal = lambda link: (show(link), shown.set())
if sys.argv[2] == "tracked":
    sys.stdout = heard  # as a tracker that stores what a run prints
with run_page.run_page(Path(sys.argv[1])):
    if not shown.wait(60):
        raise SystemExit("no link")
Path(sys.argv[1], "heard.txt").write_text(heard.getvalue())
"""


def at_terminal(folder: Path, how: str, stdout: int | None = None) -> str:
    """What the terminal of a process shows that starts the page of a run there."""
    ours, theirs = pty.openpty()
    run = subprocess.Popen(
        [sys.executable, "-c", SHOWS, str(folder), how],
        stdin=theirs,
        stdout=theirs if stdout is None else stdout,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(ours, 4096):
            shown += piece
    except OSError:  # EIO: no process has the terminal any more
        pass
    os.close(ours)
    assert run.wait(HANGS) == 0, shown
    return shown.decode()


def test_a_terminal_shows_a_link_that_no_tracker_reads(tmp_path):
    shown = at_terminal(tmp_path, "tracked")
    match = re.search(r"http://127\.0\.0\.1:\d+/\?token=[0-9a-f]{64}", shown)
    assert match is not None, shown
    begin, end = "\033]8;;", "\033\\"
    assert shown == f"{begin}{match[0]}{end}{match[0]}{begin}{end}\r\n", "a hyperlink, and nothing more"
    assert (tmp_path / "heard.txt").read_text() == f"the page of this run: open the link in {tmp_path / LINK}\n"


def test_a_run_that_prints_to_a_file_shows_no_link_at_its_terminal(tmp_path):
    with (tmp_path / "log.txt").open("w") as log:
        assert at_terminal(tmp_path, "plain", log.fileno()) == ""
    assert (tmp_path / "log.txt").read_text() == f"the page of this run: open the link in {tmp_path / LINK}\n"


def test_a_link_that_cannot_be_written_ends_the_page_with_a_notice(tmp_path, capsys):
    (tmp_path / LINK).mkdir()
    with run_page(tmp_path):
        wait_until(lambda: KEY in notices())
        psutil.wait_procs(below("verl.viewer"), HANGS)
        assert not below("verl.viewer"), "it ends before the run does"
    assert "cannot be written" in notices()[KEY] and not capsys.readouterr().out


def test_a_page_without_a_thread_is_ended_with_a_notice(tmp_path, monkeypatch):
    def no_more(_thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_more)
        with run_page(tmp_path, samples=tmp_path / "samples"):
            assert notices() == {KEY: "the page of this run cannot be started: can't start new thread"}
            assert not below("verl.viewer") and not list(tmp_path.iterdir())


def test_a_page_that_cannot_start_is_one_notice_with_the_reason(tmp_path):
    with run_page(tmp_path / "nothing"):
        wait_until(lambda: KEY in notices())
    assert "status 2; the run continues" in notices()[KEY] and "no such folder" in notices()[KEY]


def test_a_missing_program_is_a_notice_too(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with run_page(tmp_path):
        pass
    assert "cannot be started" in notices()[KEY]


def test_runs_start_their_page_where_it_is_switched_on(workplace, monkeypatch):
    started: list[tuple[Path, ...]] = []

    def spy(*places: Path) -> AbstractContextManager[None]:
        started.append(places)
        return nullcontext()

    monkeypatch.setattr(runtime, "run_page", spy)
    prepare()
    words = ["trainer.logger=[file]", "trainer.rollout_data_dir=samples", "trainer.default_local_dir"]
    train(*words[:2], f"{words[2]}=off")
    assert not started and len(list(Path("samples").glob("*.jsonl"))) == 1
    train(*words[:2], f"{words[2]}=on", "trainer.viewer=true")
    ((folder, metrics, samples),) = started
    assert folder == Path("on") and metrics.is_file()
    assert samples.name == "samples-2" and (samples / "1.jsonl").is_file(), "those of this run"
