"""Files of runs: whose they are, who may read them, and which is the newest."""

from __future__ import annotations

import os
import stat

import pytest

from verl.journal.places import file_of_run, newest_file


@pytest.fixture(autouse=True)
def usual_umask():
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_only_the_user_reads_what_a_run_records(tmp_path):
    assert mode(file_of_run(tmp_path / "journal.jsonl")) == 0o600


def test_a_file_that_an_older_version_made_is_private_from_the_next_start_on(tmp_path):
    (tmp_path / "journal.jsonl").write_text("line\n")
    assert mode(file_of_run(tmp_path / "journal.jsonl", resumed=True)) == 0o600
    assert (tmp_path / "journal.jsonl").read_text() == "line\n"
    assert file_of_run(tmp_path / "gone.jsonl", resumed=True) == tmp_path / "gone.jsonl"


def test_metrics_may_be_read_by_others(tmp_path):
    assert mode(file_of_run(tmp_path / "run.jsonl", private=False)) == 0o644


def test_the_newest_file_is_that_of_the_highest_number(tmp_path):
    made = [file_of_run(tmp_path / "journal.jsonl") for _ in range(11)]
    assert made[10].name == "journal-11.jsonl"
    for file in (made[1], made[0]):  # as a copy or an archive may leave them
        os.utime(file, (2e9, 2e9))
    (tmp_path / "journal-12.jsonl.part").touch()
    (tmp_path / "journal-notes.jsonl").touch()
    assert newest_file(tmp_path / "journal.jsonl") == made[10]
    assert newest_file(tmp_path / "other.jsonl") is None
