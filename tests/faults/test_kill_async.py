"""A few of the kills of `tests.faults.kill_async`: asynchronous runs lose nothing and double nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults.kill_async import CASES, Tally, disturb
from tests.harness.forked_runs import Server
from verl.journal.file import NAME, segments_of

pytestmark = pytest.mark.slow


def test_a_run_with_a_queue_that_is_killed_anywhere_trains_on_every_prompt_of_each_epoch_once(
    server: Server, tmp_path: Path
):
    """Its journal has several segments, none of which is dropped."""
    tally, case = Tally(), CASES["stream"]
    case = replace(case, steps=6, words=(*case.words, "trainer.journal_max_bytes=400000"))
    disturb(server, "stream", case, 3, tmp_path, seed=3, tally=tally)
    sizes = [place.stat().st_size for place in segments_of(tmp_path / "stream_whole/run" / NAME).values()]
    assert len(sizes) > 1 and sizes[0] > 1000, sizes
    assert tally.kills.total() == 3 and tally.complete >= 1, tally.table()
