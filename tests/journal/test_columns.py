"""The columns of a journal have the size of what a run requested, whatever a damaged or hostile file says."""

from __future__ import annotations

import tracemalloc

import pytest

from verl.journal.account import MOST_ASKED
from verl.journal.columns import Lineage, Names
from verl.journal.file import NAME, Journal, entry_line

HUGE = 1 << 40
FIRST = {"event": "asked", "step": 1, "first": 0, "uid": ["p", "q"], "each": 2}


def lineage_of(folder) -> Lineage:
    lineage = Lineage(Names(), Names(), Names([""]))
    lineage.refresh(folder, lambda place: place)
    return lineage


@pytest.mark.parametrize(
    "entry",
    [{**FIRST, "first": 4, "each": HUGE}, {**FIRST, "first": 4, "each": -1}, {**FIRST, "first": HUGE},
     {**FIRST, "first": 5}, {**FIRST, "first": 4, "each": MOST_ASKED},
     {"event": "trained", "step": 1, "ids": [[0, HUGE]]}, {"event": "trained", "step": 1, "ids": [[HUGE, 1]]},
     {"event": "trained", "step": 1, "ids": [[-1, 1]]}, {"event": "trained", "step": 1, "ids": [[0, 4]] * 1000}],
)  # fmt: skip
def test_an_entry_of_more_samples_than_there_are_takes_no_memory(tmp_path, entry):
    journal = Journal(tmp_path)
    journal.begin()
    journal.write(FIRST, entry)
    tracemalloc.start()
    try:
        lineage = lineage_of(tmp_path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert lineage.count == 4 and "up to a fault" in lineage.notice and peak < 4 << 20
    assert lineage.columns["stage"].tolist() == [0] * 4


@pytest.mark.parametrize(("sampled", "number"), [(HUGE, 0), (-1, 0), (3, 3), (3, -1), (3, HUGE)])
def test_a_state_of_more_samples_than_are_read_is_a_notice(tmp_path, sampled, number):
    state = {"sampled": sampled, "trained": 0, "last_step": 4, "open": [[number, "p", 0, 4, 0, None, "asked"]]}
    entry = {"event": "run", "format": 3, "step": 4, "after": 0, "state": {"samples": state}}
    (tmp_path / NAME).write_bytes(entry_line(entry))
    assert "up to a fault" in lineage_of(tmp_path).notice


def test_a_state_of_dropped_segments_gives_the_open_samples(tmp_path):
    state = {"sampled": 3, "trained": 0, "last_step": 4, "open": [[2, "p", 0, 4, 0, None, "asked"]]}
    entry = {"event": "run", "format": 3, "step": 4, "after": 0, "state": {"samples": state}}
    (tmp_path / NAME).write_bytes(entry_line(entry))
    lineage = lineage_of(tmp_path)
    assert (lineage.notice, lineage.count, lineage.columns["step"].tolist()) == ("", 3, [-1, -1, 4])
