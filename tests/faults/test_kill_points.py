"""A run that is killed at named points, again and again, ends with the bits of one that nothing disturbed."""

from __future__ import annotations

import signal

import pytest

from tests.faults.harness import Server, assert_same_end, finish, grpo, prepare
from verl.checkpoint import find_checkpoint

pytestmark = pytest.mark.dist

WITHIN_A_STEP = [("generation", 8), ("scoring", 2), ("backward", 6), ("optimizer_begin", 7), ("optimizer_end", 5)]
WITHIN_A_SAVE = [("shard", 9), ("files", 2), ("manifest", 2), ("published", 2), ("tracker", 1)]
WITHIN_A_SAVE += [("retention:renamed", 1)]


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
