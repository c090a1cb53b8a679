"""The LangGraph agent: its tool, a graph that calls it at a scripted endpoint, and what is said without the package."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from recipe.langgraph_agent.agent import MOST_STEPS, agent, calculate, graph
from recipe.langgraph_agent.main_langgraph_agent import main
from tests.harness import judges
from tests.harness.runs import logged
from tests.harness.servers import serving
from verl.errors import ConfigError

A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
ROW = {"raw_prompt": [{"role": "user", "content": "What is 6 * 7?"}]}


def answered(text: str | None, expression: str | None = None) -> tuple[int, dict]:
    """What an endpoint answers: a text, or a call of the tool."""
    message: dict = {"role": "assistant", "content": text}
    if expression is not None:
        call = {"name": "calculate", "arguments": json.dumps({"expression": expression})}
        message["tool_calls"] = [{"id": "c1", "type": "function", "function": call}]
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    return 200, {
        "id": "x", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice], "usage": usage,
    }  # fmt: skip


@pytest.fixture(autouse=True)
def no_graph_of_another_test():
    graph.cache_clear()
    yield
    graph.cache_clear()


def test_without_the_package_the_agent_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    for name in ("langchain_core.runnables", "langgraph.graph"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match="pip install langgraph langchain-openai"):
        agent("http://127.0.0.1:9", "key", ROW)


def test_the_tool_computes_exactly():
    assert (calculate("(3 + 4) * 2.5"), calculate("2 / 4"), calculate("6 * 7")) == ("17.5", "0.5", "42")


def test_an_expression_without_a_value_is_no_failure_of_the_agent():
    assert calculate("1/0") == "Error: division by zero"


def test_endless_calls_end_the_conversation_without_a_failure():
    pytest.importorskip("langgraph")
    with serving({judges.PATH: lambda _: answered(None, "1/0")}) as server:
        agent(f"{server.url}/v1", "key", ROW)
        requests = server.payloads(judges.PATH)
    assert len(requests) == MOST_STEPS / 2 and requests[-1]["messages"][-1]["content"] == "Error: division by zero"


def test_the_graph_lets_the_model_call_the_tool_and_read_its_result():
    pytest.importorskip("langgraph")

    def reply(payload: dict) -> tuple[int, dict]:
        return answered(None, "6 * 7") if payload["messages"][-1]["role"] == "user" else answered("It is 42.")

    with serving({judges.PATH: reply}) as server:
        agent(f"{server.url}/v1", "key", ROW)
        first, second = server.payloads(judges.PATH)
    assert [message["role"] for message in first["messages"]] == ["user"]
    assert [tool["function"]["name"] for tool in first["tools"]] == ["calculate"]
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "tool"]
    assert second["messages"][-1]["content"] == "42" and second["model"] == "policy"


@pytest.mark.slow
def test_the_command_trains_the_model_of_the_agent(lower_case_task: Path):
    pytest.importorskip("langgraph")
    words = ["data.train_files=train.jsonl", "data.train_batch_size=4", "data.max_prompt_length=64",
             "data.max_response_length=6", "actor_rollout_ref.model.path=model", f"{A}.ppo_mini_batch_size=4",
             "reward.custom_reward_function.path=scorer.py", f"{R}.n=2", "trainer.logger=[file]",
             "trainer.resume_mode=disable", "trainer.total_training_steps=2",
             "trainer.experiment_name=graph"]  # fmt: skip
    assert main(words) == 0
    steps = logged("logs/verl-langgraph-agent", "graph")
    assert len(steps) == 2 and all(0 < step["critic/score/mean"] < 1 for step in steps)
    assert not any(step.get("rollout/agent/failed") for step in steps)
