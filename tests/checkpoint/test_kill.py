"""A run is killed at every named point of a save; started again, it finds a complete checkpoint and saves on."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoint.builders import assert_holds, save
from tests.harness.programs import python
from verl.checkpoint import CheckpointWriter, find_checkpoint
from verl.errors import CheckpointError
from verl.metrics import notices, reset_notices

ROOT = Path(__file__).resolve().parents[2]


def points_of_a_save(root: Path) -> list[str]:
    """The names of all points that the third save of a run passes, with a replaced step and a deletion in it."""
    seen: list[str] = []
    with CheckpointWriter(root, keep={"actor": 2}, point=seen.append) as writer:
        save(writer, 1)
        save(writer, 2)
        seen.clear()
        save(writer, 3)
        save(writer, 3)
    return seen


class Killed(BaseException):
    """Stands in for a kill: nothing in the library catches it and goes on."""


def test_every_stage_of_a_save_has_a_point(tmp_path):
    seen = points_of_a_save(tmp_path)
    stages = ("begin", "actor/huggingface", "actor/optimizer.safetensors", "files", "manifest", "replaced")
    assert {*stages, "published", "tracker", "retention:renamed", "end"} <= set(seen)


def test_killed_at_any_point_a_complete_checkpoint_is_found_and_the_run_goes_on(tmp_path, monkeypatch):
    """No clean-up runs here, as after SIGKILL: the exception is thrown with the removal of leftovers disabled."""
    number = len(points_of_a_save(tmp_path / "names"))
    assert number > 20
    with CheckpointWriter(tmp_path / "begun", keep={"actor": 2}) as writer:
        save(writer, 1)
        save(writer, 2)
    for index in range(number):
        root = shutil.copytree(tmp_path / "begun", tmp_path / str(index))
        reached = 0

        def kill(name, index=index):
            nonlocal reached
            if reached == index:
                raise Killed(name)
            reached += 1

        writer = CheckpointWriter(root, keep={"actor": 2}, point=kill)
        with monkeypatch.context() as patch:
            patch.setattr(writer, "_give_up", lambda *args: None)
            with pytest.raises(Killed):
                save(writer, 3)
                save(writer, 3)
        writer.lock.release()

        with CheckpointWriter(root, keep={"actor": 2}) as again:
            found = find_checkpoint(root)
            assert found is not None, f"point {index}"
            assert_holds(found, int(found.name.split("_")[-1]))
            assert_holds(save(again, 4), 4)
            assert len([p for p in root.iterdir() if p.name.startswith(".")]) == 1, "only the lock is left"
        tracker = root / "latest_checkpointed_iteration.txt"
        assert tracker.read_text() == "4\n"


CHILD = """
import os, signal, sys
sys.path.insert(0, {root!r})
from tests.checkpoint.builders import save
from verl.checkpoint import CheckpointWriter
def point(name):
    if name == {point!r}:
        os.kill(os.getpid(), signal.SIGKILL)
writer = CheckpointWriter({folder!r}, keep={{"actor": 1}})
save(writer, 1)
writer.point = point
save(writer, 2)
"""


@pytest.mark.parametrize(("point", "step"), [("manifest", 1), ("retention:renamed", 2)])
def test_a_process_killed_by_the_kernel_leaves_a_usable_run_and_no_lock(tmp_path, point, step):
    code = CHILD.format(root=str(ROOT), folder=str(tmp_path), point=point)
    child = python("-c", code, check=False)
    assert child.returncode == -signal.SIGKILL, child.stderr
    with CheckpointWriter(tmp_path, keep={"actor": 1}) as writer:
        assert_holds(find_checkpoint(tmp_path), step)
        assert_holds(save(writer, 3), 3)
        assert [p.name for p in tmp_path.glob("global_step_*")] == ["global_step_3"]


HOLDER = """
import sys, time
sys.path.insert(0, {root!r})
from verl.checkpoint import RunLock
lock = RunLock({folder!r})
print("held", flush=True)
time.sleep(60)
"""


def test_a_second_run_in_a_folder_is_refused_until_the_first_one_is_dead(tmp_path):
    code = HOLDER.format(root=str(ROOT), folder=str(tmp_path))
    holder = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(CheckpointError, match=f"another run writes.*{holder.pid}"):
            CheckpointWriter(tmp_path)
    finally:
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
    with CheckpointWriter(tmp_path) as writer:
        save(writer, 1)


def test_a_refused_writer_of_the_same_process_does_not_drop_the_lock(tmp_path):
    """Closing any descriptor of a locked file drops a POSIX lock of the process, so the refusal must not open it."""
    code = "import sys; sys.path.insert(0, {!r})\nfrom verl.checkpoint import RunLock\nRunLock({!r})"
    with CheckpointWriter(tmp_path):
        with pytest.raises(CheckpointError, match=r"this process"):
            CheckpointWriter(tmp_path)
        other = python("-c", code.format(str(ROOT), str(tmp_path)), check=False)
    assert "another run writes" in other.stderr


def test_two_writers_of_one_process_exclude_each_other(tmp_path):
    with CheckpointWriter(tmp_path), pytest.raises(CheckpointError, match=r"another run"):
        CheckpointWriter(tmp_path)
    CheckpointWriter(tmp_path).close()


def test_a_lock_that_a_dead_run_of_another_host_left_is_taken_over_and_told(tmp_path):
    (tmp_path / ".lock").write_text('{"pid": 1, "host": "node-17", "since": "2026-01-01 00:00:00"}')
    with CheckpointWriter(tmp_path):
        told = " ".join(notices().values())
        assert "taken over" in told and "node-17" in told
    reset_notices()
    with CheckpointWriter(tmp_path):
        assert notices() == {}, "a lock that was released says nothing"
