"""Traces of a batch: what is recorded of a conversation, of which rows, and that this changes and ends no run."""

from __future__ import annotations

import time

import numpy as np
import pytest

from tests.agent_loop.test_tool_agent import ASK, ECHO, ODD, call, ids
from tests.harness.conversations import Script, manager, rollout, rows, tool_file
from tests.harness.models import tiny_tokenizer
from verl.agent_loop.row_traces import TRACED, mark_traced
from verl.metrics import notices, reset_notices
from verl.observability import traces
from verl.observability.traced_call import TraceBackend, TracedCall

KEY = "actor_rollout_ref.rollout.trace.backend=mlflow"


class Kept(TraceBackend):
    """Keeps the traces that it is given, or fails as it is told."""

    def __init__(self, fails: str = ""):
        super().__init__("sums", "first")
        self.fails, self.kept = fails, []

    def write(self, trace: TracedCall) -> None:
        if self.fails == "hangs":
            time.sleep(1.0)
        if self.fails:
            raise ConnectionError("no server")
        self.kept.append(trace)


@pytest.fixture
def backend(monkeypatch):
    """What stands for the tracker; every message is new."""
    kept = Kept()
    monkeypatch.setattr(traces, "_backend", lambda *names: kept)
    monkeypatch.setattr(traces, "_active", None)
    reset_notices()
    yield kept


def play(folder, table, script=None, **settings):
    """The batch of a conversation with one call of a tool."""
    tokenizer = tiny_tokenizer()
    given = {
        "multi_turn__enable": True,
        "multi_turn__tool_config_path": tool_file(folder, ("Echo", ECHO), ("Odd", ODD)),
    }
    texts = script or [call("echo", text="beep"), "done"]
    config = rollout(**given, multi_turn__tool_timeout=5.0, **settings)
    return manager(config, Script([ids(tokenizer, text) for text in texts]), tokenizer).generate_sequences(table)


def same(left, right) -> bool:
    return all(left.batch[name].equal(right.batch[name]) for name in left.batch.keys())


def test_a_conversation_is_one_trace_with_its_calls_and_their_text(backend, tmp_path):
    table = rows(ASK, ASK, index=[17, 17], uid=["a", "a"])
    table.meta_info = {"global_steps": 3, "validate": True}
    batch = play(tmp_path, table, trace__backend="mlflow", trace__token2text=True)
    first, second = sorted(backend.kept, key=lambda one: one.attributes["rollout_n"])
    assert first.attributes == {
        "experiment_name": "first", "step": 3, "validate": True, "sample_index": 17, "rollout_n": 0
    }  # fmt: skip
    assert second.attributes["rollout_n"] == 1
    assert [(one.kind, one.name) for one in first.calls] == [
        ("llm", "generate"), ("tool", "tool echo"), ("llm", "generate")
    ]  # fmt: skip
    asks, tool, answers = first.calls
    assert asks.outputs["response_text"] == call("echo", text="beep") and asks.inputs["prompt_text"].count("hi") == 1
    assert tool.inputs["call"]["arguments"] == '{"text": "beep"}' and tool.outputs["answer"] == "beep"
    assert answers.outputs["response_text"] == "done" and "beep" in answers.inputs["prompt_text"]
    assert first.inputs["raw_prompt"] == ASK and first.outputs["num_turns"] == 4
    length = int(batch.batch["response_mask"][0].shape[0])
    assert first.outputs["response_ids"] == batch.batch["responses"][0][:length].tolist()
    assert first.begin <= asks.begin <= asks.end <= tool.begin <= answers.end <= first.end


def test_traces_change_no_batch_and_cost_none_of_its_rows_where_they_are_off(backend, tmp_path):
    table = rows(ASK, ASK)
    plain, recorded = play(tmp_path, table), play(tmp_path, table, trace__backend="mlflow")
    assert same(plain, recorded) and len(backend.kept) == 2
    given = [{"uid": "a"}]
    assert mark_traced(rollout(), given, [("a", 0)], [0], {})[0] is given[0]


@pytest.mark.parametrize("fails", ["at once", "hangs"])
def test_a_tracker_that_fails_is_told_once_and_ends_nothing(backend, tmp_path, monkeypatch, fails):
    backend.fails = fails
    monkeypatch.setattr(traces, "PATIENCE", 0.05)
    table = rows(*[ASK] * 4)
    assert same(play(tmp_path, table, trace__backend="mlflow"), play(tmp_path, table))
    (text,) = [text for key, text in notices().items() if key == KEY]
    assert ("no server" if fails == "at once" else "no trace within") in text and "the run continues" in text


def test_a_call_that_fails_and_a_row_that_is_masked_say_so_in_their_traces(backend, tmp_path):
    play(tmp_path, rows(ASK), [call("odd", kind="raises"), "done"], trace__backend="mlflow")
    (trace,) = backend.kept
    assert "a bug of mine" in trace.calls[1].outputs["answer"] and trace.calls[1].outputs["fault"] == "failed"
    backend.kept.clear()
    with pytest.raises(Exception, match="all 1 rollouts"):
        play(tmp_path, rows(ASK, tool_selection=[["none"]]), trace__backend="mlflow")
    assert "selects a tool that there is not" in backend.kept[0].error


def test_of_each_runner_so_many_prompts_are_recorded_with_all_their_samples():
    uids = [uid for uid in "abcdef" for _ in range(3)]
    given, streams = [{"uid": uid} for uid in uids], [(uid, i % 3) for i, uid in enumerate(uids)]
    places = [i * 2 // len(uids) for i in range(len(uids))]
    config = rollout(trace__backend="mlflow", trace__max_samples_per_step_per_worker=2)

    def chosen(step: int) -> list[str]:
        return [
            row["uid"] for row in mark_traced(config, given, streams, places, {"global_steps": step}) if TRACED in row
        ]

    steps = [chosen(step) for step in range(8)]
    assert steps == [chosen(step) for step in range(8)] and len({tuple(one) for one in steps}) > 1
    for one in steps:
        names, counts = np.unique(one, return_counts=True)
        assert counts.tolist() == [3] * 4 and sum(name in "abc" for name in names) == 2
