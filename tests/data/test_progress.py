"""What a person at a terminal sees of long work; a pipe sees nothing of it."""

from __future__ import annotations

import re
import sys

import pytest

from verl.data.progress import timed, track


@pytest.mark.parametrize("is_terminal", [True, False])
def test_work_is_announced_and_timed_in_a_terminal_alone(monkeypatch, capsys, is_terminal):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    with timed("loading actor"):
        begun = capsys.readouterr()
    done = capsys.readouterr()
    assert begun.err == ("loading actor ...\n" if is_terminal else "") and begun.out == done.out == ""
    assert re.fullmatch(r"loading actor: \d+\.\d s\n" if is_terminal else "", done.err)


def test_items_pass_through_a_pipe_without_a_bar(capsys):
    assert list(track(iter("abc"), "reading", 3)) == ["a", "b", "c"]
    assert capsys.readouterr() == ("", "")
