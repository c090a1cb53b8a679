"""A few of the kills of `tests.faults.kill_async`: asynchronous runs lose nothing and double nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults.kill_async import CASES, Tally, disturb
from tests.harness.forked_runs import Server

pytestmark = pytest.mark.slow


def test_a_run_with_a_queue_that_is_killed_anywhere_trains_on_every_prompt_of_each_epoch_once(
    server: Server, tmp_path: Path
):
    tally = Tally()
    disturb(server, "stream", replace(CASES["stream"], steps=6), 3, tmp_path, seed=3, tally=tally)
    assert tally.kills.total() == 3 and tally.complete >= 1, tally.table()
