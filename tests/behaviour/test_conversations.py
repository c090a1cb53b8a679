"""Conversations with a tool are as exact as single turns: a run that stops and goes on ends with the same bits."""

from __future__ import annotations

import pytest

from tests.behaviour.test_resume import train
from tests.harness.every_answer import SETTINGS
from tests.harness.runs import differing, prepare, records, saved_tensors


@pytest.fixture
def here(workplace):
    prepare(rows=6)
    return workplace


def test_stopping_between_two_steps_of_conversations_changes_no_bit(here):
    train(2, "straight", *SETTINGS, "trainer.rollout_data_dir=dump")
    rows = [row for step in (1, 2) for row in records(f"dump/{step}.jsonl")]
    assert {row["num_turns"] for row in rows} == {6}, "three answers and two of the tool, after one question"
    assert {row["ended"] for row in rows} == {"max_assistant_turns"}
    assert len({row["output"] for row in rows}) == len(rows), "every sample draws numbers of its own"
    train(1, "stopped", *SETTINGS, "trainer.save_freq=1")
    train(2, "stopped", *SETTINGS)
    assert differing("straight/global_step_2", "stopped/global_step_2") == []
    assert len(saved_tensors("straight/global_step_2")) > 50
