"""A run that is killed at named points, again and again, ends with the bits of one that nothing disturbed."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

from tests.harness.forked_runs import STEPS, Server, assert_same_end, finish, grpo, metrics, prepare
from tests.harness.waiting import HANGS
from verl.checkpoint import find_checkpoint

pytestmark = pytest.mark.slow

WITHIN_A_STEP = [("generation", 8), ("scoring", 2), ("backward", 6), ("optimizer_begin", 7), ("optimizer_end", 5)]
WITHIN_A_SAVE = [("shard", 9), ("files", 2), ("manifest", 2), ("published", 2), ("tracker", 1)]
WITHIN_A_SAVE += [("retention:renamed", 1)]


RANDOM_KILLS, MEAN_LIFE = 8, 0.08
BACKGROUND = ["actor_rollout_ref.actor.checkpoint.async_save=true"]


@pytest.mark.parametrize(
    ("points", "settings"),
    [(WITHIN_A_STEP, []), (WITHIN_A_SAVE, []), (WITHIN_A_SAVE, BACKGROUND)],
    ids=["within a step", "within a save", "within a save in the background"],
)
def test_killed_at_every_point_in_turn_a_run_ends_with_the_bits_of_an_undisturbed_one(
    server: Server, whole, tmp_path, points, settings
):
    folder = prepare(tmp_path)
    for name, count in points:
        ended = server.start(folder, grpo() + settings, f"{name}:{count}:KILL").wait()
        assert ended.status == -signal.SIGKILL, f"{name}: {ended.output[-2000:]}"
    assert find_checkpoint(folder / "run") is not None
    finish(server, folder, grpo() + settings)
    assert_same_end(whole, folder)
    left = {path.name for path in (folder / "run").iterdir()}
    assert {name for name in left if name.startswith(".")} == {".lock"}, "nothing half done is left"
    assert {"global_step_5", "global_step_6"} <= left, "retention counts across the restarts"
    assert len([name for name in left if name.startswith("global_step")]) == 2


def test_a_run_that_validates_loses_and_repeats_no_metric_when_it_is_killed_around_a_save(server: Server, tmp_path):
    validating = ["data.val_files=train.parquet", "trainer.test_freq=2", "trainer.total_training_steps=3"]
    one, hit = prepare(tmp_path / "one"), prepare(tmp_path / "hit")
    finish(server, one, grpo() + validating)
    for name, count in [("manifest", 2), ("published", 1), ("tracker", 1)]:
        ended = server.start(hit, grpo() + validating, f"{name}:{count}:KILL").wait()
        assert ended.status == -signal.SIGKILL, ended.output[-2000:]
    finish(server, hit, grpo() + validating)
    assert metrics(one) == metrics(hit)
    assert [row["step"] for row in metrics(hit)] == [0, 1, 2, 3]
    assert any(name.startswith("val-core") for name in metrics(hit)[2])


def test_killed_at_random_instants_a_run_ends_with_the_bits_of_an_undisturbed_one(server: Server, whole, tmp_path):
    """Whatever is going on: the instants are counted from when the run holds its folder, which is before it resumes."""
    folder, instants, kills = prepare(tmp_path), random.Random(7), 0
    lock = folder / "run/.lock"
    while kills < RANDOM_KILLS:
        run = server.start(folder, grpo())
        end = time.monotonic() + HANGS
        while not (lock.exists() and f'"pid": {run.pid},' in lock.read_text()) and time.monotonic() < end:
            time.sleep(0.002)
        time.sleep(instants.expovariate(1 / MEAN_LIFE))
        if last_saved_step(folder) >= STEPS:
            run.wait()
            break  # it is complete: there is nothing left to disturb
        run.send(signal.SIGKILL)
        assert run.wait().status in (0, -signal.SIGKILL)
        kills += 1
    finish(server, folder, grpo())
    assert kills >= 2
    assert_same_end(whole, folder)


def last_saved_step(folder: Path) -> int:
    saved = [int(path.name.rpartition("_")[2]) for path in (folder / "run").glob("global_step_*")]
    return max(saved, default=0)
