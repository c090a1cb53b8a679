"""The page that a run starts: its link is in a private file, it ends with the run, and a failure is a notice."""

from __future__ import annotations

import re
import stat
import sys
import threading
from pathlib import Path

import psutil
import pytest

from tests.harness.runs import prepare, train
from tests.harness.waiting import HANGS, wait_until
from tests.viewer.recorded_runs import RecordedRun
from tests.viewer.served import Site
from verl.metrics import notices, reset_notices
from verl.trainer import runtime
from verl.viewer.run_page import KEY, LINK, RunPage

ADDRESS = re.compile(r"http://127\.0\.0\.1:(\d+)/\?token=([0-9a-f]{64})\n")


@pytest.fixture(autouse=True)
def _fresh():
    reset_notices()


def below(command: str) -> list[psutil.Process]:
    return [one for one in psutil.Process().children(recursive=True) if command in " ".join(one.cmdline())]


def test_the_page_of_a_run_shows_it_and_ends_with_the_block(tmp_path, capsys):
    run, printed = RecordedRun(tmp_path / "run", steps=1), []
    elsewhere, file = tmp_path / "elsewhere", run.folder / LINK
    elsewhere.mkdir()
    file.write_text("of a run that was killed")
    file.chmod(0o644)
    with RunPage(run.folder, run.folder / "metrics.jsonl", elsewhere):

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


def test_a_link_that_cannot_be_written_ends_the_page_with_a_notice(tmp_path, capsys):
    (tmp_path / LINK).mkdir()
    with RunPage(tmp_path) as page:
        assert page._process is not None and page._reader is not None
        page._reader.join(HANGS)
        assert page._process.poll() is not None, "it ends before the run does"
    assert "cannot be written" in notices()[KEY] and not capsys.readouterr().out


def test_a_page_without_a_thread_is_ended_with_a_notice(tmp_path, monkeypatch):
    def no_more(_thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_more)
        with RunPage(tmp_path, samples=tmp_path / "samples"):
            assert notices() == {KEY: "the page of this run cannot be started: can't start new thread"}
            assert not below("verl.viewer") and not list(tmp_path.iterdir())


def test_a_page_that_cannot_start_is_one_notice_with_the_reason(tmp_path):
    with RunPage(tmp_path / "nothing"):
        wait_until(lambda: KEY in notices())
    assert "status 2; the run continues" in notices()[KEY] and "no such folder" in notices()[KEY]


def test_a_missing_program_is_a_notice_too(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with RunPage(tmp_path):
        pass
    assert "cannot be started" in notices()[KEY]


def test_runs_start_their_page_where_it_is_switched_on(workplace, monkeypatch):
    started = []

    class Spy(RunPage):
        def __enter__(self) -> RunPage:
            started.append(self._command[4:])
            return self

    monkeypatch.setattr(runtime, "RunPage", Spy)
    prepare()
    words = ["trainer.logger=[file]", "trainer.rollout_data_dir=samples", "trainer.default_local_dir"]
    train(*words[:2], f"{words[2]}=off")
    assert not started and len(list(Path("samples").glob("*.jsonl"))) == 1
    train(*words[:2], f"{words[2]}=on", "trainer.viewer=true")
    (command,) = started
    samples = Path(command[3])
    assert command[::2] == ["--metrics", "--samples"] and Path(command[1]).is_file()
    assert samples.name == "samples-2" and (samples / "1.jsonl").is_file(), "those of this run"
