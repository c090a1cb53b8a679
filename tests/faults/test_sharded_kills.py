"""One of four ranks is killed within a save, or has no more room: `sharded_kills` does it at every write."""

from __future__ import annotations

import pytest

from tests.faults.sharded_kills import BYTES, RECORDS, TRACKER, Hit, Runs

pytestmark = pytest.mark.slow


def test_a_rank_that_dies_or_has_no_room_in_a_save_leaves_a_complete_checkpoint_and_the_same_bits_follow(tmp_path):
    runs = Runs(tmp_path)
    root = runs.begun("hit")
    runs.hit(root, Hit(3, 1, name=RECORDS))
    assert runs.step(root) == 1
    told = runs.hit(root, Hit(1, 9, "FULL", BYTES))
    assert runs.step(root) == 1 and not list(root.glob(".writing-*")), "neither run's leftovers stay"
    assert "rank 1 failed" in told and "File too large" in told and f"newest intact checkpoint is {root}" in told
    runs.hit(root, Hit(0, 1, name=TRACKER))
    assert runs.step(root) == 2, "it was in place, and its bytes are those of the undisturbed run"
    assert runs.loss(root) == runs.loss(runs.straight)
