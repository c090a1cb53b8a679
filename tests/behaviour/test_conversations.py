"""Conversations with a tool are as exact as single turns: a run that stops and goes on ends with the same bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.behaviour.test_resume import SCORER, tensors, train
from tests.support import tiny_model_dir, write_prompts
from verl.metrics import reset_notices

CALLING = '''from verl.agent_loop.parsers import FunctionCall, Parsed, ToolParser
from verl.tools.function_tool import function_tool


class EveryAnswer(ToolParser):
    """Every answer is a call, and one token in eight ends it: a random model has conversations."""

    @property
    def stop_token_ids(self):
        return list(range(0, 259, 8))

    def parse_text(self, text, tools=None):
        return Parsed(text, [FunctionCall("{}", "weather")])


@function_tool()
def weather() -> str:
    """The weather."""
    return "wet"
'''
TURNS = "actor_rollout_ref.rollout.multi_turn"
CHANGES = [
    f"{TURNS}.enable=true",
    f"{TURNS}.format=calling.EveryAnswer",
    f"{TURNS}.function_tool_path=calling.py",
    f"{TURNS}.max_assistant_turns=3",
    "data.max_response_length=160",
    "actor_rollout_ref.actor.optim.lr=1e-3",
]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    reset_notices()
    tiny_model_dir("model")
    write_prompts("train.parquet", 6)
    Path("scorer.py").write_text(SCORER)
    Path("calling.py").write_text(CALLING)
    return tmp_path


def test_stopping_between_two_steps_of_conversations_changes_no_bit(here):
    train(2, "straight", *CHANGES, "trainer.rollout_data_dir=dump")
    rows = [json.loads(line) for step in (1, 2) for line in (here / f"dump/{step}.jsonl").read_text().splitlines()]
    assert {row["num_turns"] for row in rows} == {6}, "three answers and two of the tool, after one question"
    assert {row["ended"] for row in rows} == {"max_assistant_turns"}
    assert len({row["output"] for row in rows}) == len(rows), "every sample draws numbers of its own"
    train(1, "stopped", *CHANGES, "trainer.save_freq=1")
    train(2, "stopped", *CHANGES)
    whole, resumed = tensors(here / "straight/global_step_2"), tensors(here / "stopped/global_step_2")
    assert whole.keys() == resumed.keys() and len(whole) > 50
    assert [key for key in whole if not whole[key].equal(resumed[key])] == []
