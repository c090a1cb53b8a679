"""The lock of a run folder: what may stand in the place of its file."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.checkpoint.builders import save
from tests.harness.programs import PROJECT
from verl.checkpoint import CheckpointWriter, RunLock
from verl.errors import CheckpointError
from verl.metrics import notices


def test_a_link_in_the_place_of_the_lock_is_not_followed(tmp_path):
    (tmp_path / "other").write_text("precious")
    (tmp_path / ".lock").symlink_to(tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"the lock of the run folder cannot be opened: it is a link.*\.lock"):
        RunLock(tmp_path)
    assert (tmp_path / "other").read_text() == "precious"


def test_a_folder_in_the_place_of_the_lock_is_named(tmp_path):
    (tmp_path / ".lock").mkdir()
    with pytest.raises(CheckpointError, match="cannot be opened: it is a folder"):
        CheckpointWriter(tmp_path)


def test_a_lock_that_was_removed_under_a_run_is_taken_again(tmp_path):
    with CheckpointWriter(tmp_path) as writer:
        save(writer, 1)
        (tmp_path / ".lock").unlink()
        save(writer, 2)
        assert "removed or replaced while the run held it" in notices()[f"lock {tmp_path.resolve() / '.lock'}"]
        with pytest.raises(CheckpointError, match="another run writes"):
            RunLock(tmp_path)


HOLDER = "import sys; from verl.checkpoint import RunLock; RunLock(sys.argv[1]); print(flush=True); sys.stdin.read()"


def test_a_run_whose_lock_another_one_has_taken_saves_nothing(tmp_path):
    with CheckpointWriter(tmp_path) as writer:
        (tmp_path / ".lock").unlink()
        command = [sys.executable, "-c", HOLDER, str(tmp_path)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=PROJECT) as other:
            other.stdout.readline()
            with pytest.raises(CheckpointError, match="another run writes its checkpoints into this folder"):
                save(writer, 1)
            other.stdin.close()
    assert not (tmp_path / "global_step_1").exists()
