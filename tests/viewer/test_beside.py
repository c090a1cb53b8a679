"""The page that a run starts: its link is printed once, it ends with the run, and a failure is a notice."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import psutil
import pytest

from tests.harness.runs import prepare, train
from tests.harness.waiting import wait_until
from tests.viewer.recorded_runs import RecordedRun
from tests.viewer.served import Site
from verl.metrics import notices, reset_notices
from verl.trainer import runtime
from verl.viewer.beside import KEY, RunPage

LINK = re.compile(r"the page of this run: http://127\.0\.0\.1:(\d+)/\?token=([0-9a-f]{64})\n")


@pytest.fixture(autouse=True)
def _fresh():
    reset_notices()


def below(command: str) -> list[psutil.Process]:
    return [one for one in psutil.Process().children(recursive=True) if command in " ".join(one.cmdline())]


def test_the_page_of_a_run_shows_it_and_ends_with_the_block(tmp_path, capsys):
    run, printed = RecordedRun(tmp_path / "run", steps=1), []
    elsewhere = tmp_path / "elsewhere" / "samples"
    with RunPage(run.folder, run.folder / "metrics.jsonl", elsewhere):

        def link() -> re.Match[str] | None:
            printed.append(capsys.readouterr().out)
            return LINK.search("".join(printed))

        wait_until(lambda: link() is not None, lambda: f"no link: {notices()}")
        match = LINK.fullmatch("".join(printed))
        assert match is not None and elsewhere.is_dir(), "once, and nothing more"
        site = Site(int(match[1]))
        assert site.send("/api/runs", token=match[2]).json["runs"][0]["last_step"] == 1
        pages = below("verl.viewer")
        assert pages
    assert not below("verl.viewer") and not any(page.is_running() for page in pages)
    assert not notices()


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
            started.append([self._command[4:], self._samples])
            return self

    monkeypatch.setattr(runtime, "RunPage", Spy)
    prepare()
    words = ["trainer.logger=[file]", "trainer.rollout_data_dir=samples", "trainer.default_local_dir"]
    train(*words[:2], f"{words[2]}=off")
    assert not started and len(list(Path("samples").glob("*.jsonl"))) == 1
    train(*words[:2], f"{words[2]}=on", "trainer.viewer=true")
    ((command, samples),) = started
    assert command[::2] == ["--metrics", "--samples"] and Path(command[1]).is_file()
    assert samples.name == "samples-2" and (samples / "1.jsonl").is_file(), "those of this run"
