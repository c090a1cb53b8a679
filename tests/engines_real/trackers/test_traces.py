"""Rollout traces in the real MLflow, in a local database: what was recorded can be searched for and read back."""

from __future__ import annotations

import asyncio
import sqlite3

import mlflow
import pytest

from tests.engines_real.trackers.test_offline import offline  # noqa: F401
from verl.compat.forms.traces import RolloutTraceConfig, rollout_trace_attr, rollout_trace_op
from verl.metrics import notices
from verl.observability import traces


@rollout_trace_op
async def generate(prompt_ids):
    await asyncio.sleep(0.01)
    return {"token_ids": [*prompt_ids, 7]}


@rollout_trace_op
def tool(text):
    raise ValueError(f"no {text}")


async def conversation(index: int) -> None:
    with rollout_trace_attr(sample_index=index, step=index + 1, rollout_n=0, name="agent_loop"):
        await generate([1, 2])
        with pytest.raises(ValueError, match="no page"):
            tool("page")


@pytest.fixture
def closed(monkeypatch):
    """Nothing is recorded when the test ends."""
    yield
    monkeypatch.setattr(traces, "_active", None)


def test_mlflow_keeps_traces_with_their_tags_and_calls_and_tells_once_that_it_cannot(offline, closed):  # noqa: F811
    RolloutTraceConfig.init("sums", "first", "mlflow")
    assert RolloutTraceConfig.get_client() is mlflow
    for index in range(2):
        asyncio.run(conversation(index))
    traces.active().flush(120)  # MLflow makes its database first
    RolloutTraceConfig.reset()
    assert not notices()
    experiment = mlflow.MlflowClient().get_experiment_by_name("sums").experiment_id
    (trace,) = mlflow.search_traces(locations=[experiment], filter_string="tags.step = '2'", return_type="list")
    tags = {name: trace.info.tags[name] for name in ("sample_index", "rollout_n", "validate", "experiment_name")}
    assert tags == {"sample_index": "1", "rollout_n": "0", "validate": "False", "experiment_name": "first"}
    root, first, second = trace.data.spans
    assert root.name == "agent_loop" and first.parent_id == second.parent_id == root.span_id
    assert (first.name, first.inputs, first.outputs) == ("generate", {"prompt_ids": [1, 2]}, {"token_ids": [1, 2, 7]})
    assert first.end_time_ns - first.start_time_ns >= 10_000_000
    assert second.status.status_code == "ERROR" and second.attributes["error"] == "ValueError: no page"

    RolloutTraceConfig.init("sums", "first", "mlflow")
    with sqlite3.connect(offline / "mlflow.db") as database:
        database.execute("drop table trace_info")
    for index in range(3):
        asyncio.run(conversation(index))
    RolloutTraceConfig.reset()
    (text,) = notices().values()
    assert "trace_info" in text and "the run continues without traces" in text
