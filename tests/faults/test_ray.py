"""The same faults on Ray: of a worker's process, of the controller, and signals; nothing stays behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.faults.points import PAUSE_SECONDS
from tests.harness.forked_runs import (
    STOPPING,
    Server,
    assert_no_process_left,
    assert_same_end,
    finish,
    grpo,
    prepare,
    seconds_since_kill,
)
from verl.checkpoint import list_checkpoints

pytestmark = pytest.mark.slow

RAY = [*grpo(), "trainer.runtime=ray"]


def shared_memory() -> set[str]:
    return {p.name for p in Path("/dev/shm").iterdir() if p.stat().st_uid == os.getuid() and "plasma" in p.name}


def assert_nothing_left(folder: Path) -> None:
    assert_no_process_left(folder, besides=("Agent",))
    # Ray's own agents look for their parent every few seconds, and give it several chances.
    assert_no_process_left(folder)


def test_whatever_dies_the_run_ends_without_orphans_and_started_again_it_ends_with_the_same_bits(
    server: Server, whole, tmp_path, record_property
):
    folder, memory = prepare(tmp_path), shared_memory()

    # A worker's process, in the middle of the backward pass of step 2.
    ended = server.start(folder, RAY, "backward:6:KILL").wait()
    assert ended.status not in (0, -signal.SIGKILL), "the controller lives and reports"
    assert "the worker ColocatedActorRefRollout[0] died (process" in ended.output, ended.output[-3000:]
    assert_nothing_left(folder)
    assert list_checkpoints(folder / "run")[0].step == 1

    # The controller, between the rename of a checkpoint and the file that names it.
    ended = server.start(folder, RAY, "published:1:KILL").wait()
    assert ended.status == -signal.SIGKILL
    assert_nothing_left(folder)
    record_property("noticed_seconds", seconds_since_kill(folder))
    assert list_checkpoints(folder / "run")[0].step == 2

    # SIGTERM to the controller while a worker samples step 3.
    run = server.start(folder, [*RAY, "trainer.save_freq=100"], "generation:3:PAUSE")
    worker = run.until_paused()
    assert worker != run.pid, "a process of its own samples"
    run.send(signal.SIGTERM)
    (folder / "paused").unlink()
    ended = run.wait()
    assert ended.status == 143, ended.output[-3000:]
    assert_nothing_left(folder)
    assert list_checkpoints(folder / "run")[0].step in (2, 3)

    finish(server, folder, [*RAY, "actor_rollout_ref.actor.checkpoint.async_save=true"])
    assert_nothing_left(folder)
    assert_same_end(whole, folder)
    assert shared_memory() <= memory


def test_a_second_signal_ends_the_controller_at_once_and_its_workers_with_it(server: Server, tmp_path):
    folder = prepare(tmp_path)
    run = server.start(folder, RAY, "backward:2:PAUSE")
    run.until_paused()
    run.send(signal.SIGINT)
    run.until_said(STOPPING)
    run.send(signal.SIGINT)
    ended = run.wait(PAUSE_SECONDS / 3)
    assert ended.status == 130, "it did not wait for the end of the pause"
    assert_nothing_left(folder)
