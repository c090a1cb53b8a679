"""``verl view`` as a person starts it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys

import pytest

from tests.harness.programs import python
from tests.viewer.served import Site
from verl.viewer.__main__ import main

LINK = re.compile(r"http://127\.0\.0\.1:(\d+)/\?token=([0-9a-f]{64})\n")


def test_the_command_prints_a_link_and_ends_with_an_interrupt(tmp_path):
    command = [sys.executable, "-m", "verl", "view", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        assert program.stdout and program.stderr
        match = LINK.fullmatch(program.stdout.readline())
        assert match is not None
        site = Site(int(match[1]))
        assert site.send("/api/runs", token=match[2]).json["runs"][0]["folder"] == str(tmp_path.resolve())
        assert site.send("/api/runs", token="0" * 64).status == 401
        program.send_signal(signal.SIGINT)
        program.wait()
        assert (program.returncode, program.stderr.read()) == (0, "")


def test_a_folder_that_is_none_is_a_message(tmp_path, capsys):
    assert main([str(tmp_path / "nothing")]) == 2
    assert "no such folder" in capsys.readouterr().err


def test_more_folders_of_samples_than_runs_are_refused(tmp_path, capsys):
    assert main([str(tmp_path), "--samples", "a", "--samples", "b"]) == 2
    assert "--samples" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--samples", "--metrics"])
def test_a_place_that_does_not_exist_is_named_with_its_flag(tmp_path, capsys, flag):
    assert main([str(tmp_path), flag, str(tmp_path / "mistyped")]) == 2
    shown = capsys.readouterr().err
    assert flag in shown and "mistyped" in shown


def test_the_help_names_the_command():
    assert python("-m", "verl", "view", "--help").stdout.startswith("usage: verl view")
