"""A ReAct agent as a LangGraph graph: the model answers or calls a tool, whose result returns to it.

The graph is LangGraph's, the model LangChain's ``ChatOpenAI``; only its ``base_url`` is the run's.
"""

import contextlib
import functools
from collections.abc import Mapping
from typing import Any

from examples.calculator import tool as calculator
from verl.errors import ConfigError

PACKAGES = "langgraph langchain-openai"
MOST_STEPS = 16
"""Answers and rounds of tools, after which the conversation ends and is scored as it stands."""


def calculate(expression: str) -> str:
    """Compute an arithmetic expression, for example (3 + 4) * 2.5."""
    try:
        return calculator.shown(calculator.calculate(expression))
    except ValueError as error:  # the model's: an agent that fails would take the row out of the loss
        return f"Error: {error}"


@functools.cache
def graph() -> Any:
    """The compiled graph: its state has ``messages``, its configuration the ``model``.

    Raises:
        ConfigError: LangGraph is not installed.
    """
    try:
        from langchain_core.runnables import RunnableConfig
        from langgraph.graph import START, MessagesState, StateGraph
        from langgraph.prebuilt import ToolNode, tools_condition
    except ModuleNotFoundError as error:
        fix = f"pip install {PACKAGES}"
        raise ConfigError("this agent is a LangGraph graph", key="langgraph", got="not installed", fix=fix) from error

    def answer(state: dict[str, Any], config: RunnableConfig) -> dict[str, Any]:
        return {"messages": [config["configurable"]["model"].invoke(state["messages"])]}

    builder = StateGraph(MessagesState)
    builder.add_node("agent", answer)
    builder.add_node("tools", ToolNode([calculate]))
    builder.add_edge(START, "agent")
    builder.add_conditional_edges("agent", tools_condition)
    builder.add_edge("tools", "agent")
    return builder.compile()


def agent(base_url: str, api_key: str, row: Mapping[str, Any]) -> None:
    """One conversation about the row's prompt; the run's reward function scores its text.

    Args:
        base_url, api_key: of the run's endpoint, for this row.
        row: the columns of the data.

    Raises:
        ConfigError: the packages are not installed.
    """
    compiled = graph()
    from langchain_openai import ChatOpenAI
    from langgraph.errors import GraphRecursionError

    model = ChatOpenAI(model="policy", base_url=base_url, api_key=api_key, max_retries=0)
    messages = [dict(message) for message in row["raw_prompt"]]
    options = {"recursion_limit": MOST_STEPS, "configurable": {"model": model.bind_tools([calculate])}}
    with contextlib.suppress(GraphRecursionError):
        compiled.invoke({"messages": messages}, options)
