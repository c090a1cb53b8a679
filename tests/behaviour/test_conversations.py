"""Conversations with a tool are as exact as single turns: a run that stops and goes on ends with the same bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.behaviour.test_resume import SCORER, tensors, train
from tests.harness.every_answer import SETTINGS
from tests.harness.models import tiny_model_dir
from tests.harness.rows import write_prompts
from verl.metrics import reset_notices


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    reset_notices()
    tiny_model_dir("model")
    write_prompts("train.parquet", 6)
    Path("scorer.py").write_text(SCORER)
    return tmp_path


def test_stopping_between_two_steps_of_conversations_changes_no_bit(here):
    train(2, "straight", *SETTINGS, "trainer.rollout_data_dir=dump")
    rows = [json.loads(line) for step in (1, 2) for line in (here / f"dump/{step}.jsonl").read_text().splitlines()]
    assert {row["num_turns"] for row in rows} == {6}, "three answers and two of the tool, after one question"
    assert {row["ended"] for row in rows} == {"max_assistant_turns"}
    assert len({row["output"] for row in rows}) == len(rows), "every sample draws numbers of its own"
    train(1, "stopped", *SETTINGS, "trainer.save_freq=1")
    train(2, "stopped", *SETTINGS)
    whole, resumed = tensors(here / "straight/global_step_2"), tensors(here / "stopped/global_step_2")
    assert whole.keys() == resumed.keys() and len(whole) > 50
    assert [key for key in whole if not whole[key].equal(resumed[key])] == []
