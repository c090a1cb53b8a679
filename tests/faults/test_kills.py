"""A few of the kills of `tests.faults.kills`: no schedule loses a sample, trains on one twice, or changes a bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults.kills import CASES, Disturbed, Tally, disturb, run_undisturbed
from tests.harness.forked_runs import Server
from verl.journal.file import NAME, segments_of

pytestmark = pytest.mark.slow
KILLS = 3


@pytest.mark.parametrize("name", CASES)
def test_a_killed_run_loses_nothing_and_ends_with_equal_bits(
    server: Server, tmp_path: Path, name: str, record_property: Callable[[str, object], None]
):
    tally = Tally()
    try:
        disturb(server, name, replace(CASES[name], steps=6), KILLS, tmp_path, seed=3, tally=tally)
    finally:
        record_property("lost", tally.lost)
        record_property("doubled", tally.doubled)
        record_property("bits_equal", tally.equal == tally.complete)
    assert tally.kills.total() == KILLS and tally.equal == tally.complete >= 1, tally


def test_a_killed_run_keeps_every_segment_of_its_journal(server: Server, tmp_path: Path):
    case = CASES["fully_async"]
    case = replace(case, steps=6, words=(*case.words, "trainer.journal_max_bytes=400000"))
    undisturbed = run_undisturbed(server, case, tmp_path / "undisturbed")
    run = Disturbed(server, case, tmp_path / "killed", undisturbed, random.Random(3), Tally())
    assert run.hit(KILLS) >= 1
    run.finish()
    sizes = [place.stat().st_size for place in segments_of(run.folder / "run" / NAME).values()]
    assert len(sizes) > 1 and sizes[0] > 1000, sizes
