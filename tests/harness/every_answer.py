"""A parser to which every answer is a call, and the tool that it calls: a random model has conversations with them."""

from __future__ import annotations

from typing import Any

from verl.agent_loop.parsers import FunctionCall, Parsed, ToolParser
from verl.tools.function_tool import function_tool


class EveryAnswer(ToolParser):
    """One token in eight ends an answer, and each answer calls ``weather``."""

    @property
    def stop_token_ids(self) -> list[int]:
        return list(range(0, 259, 8))

    def parse_text(self, text: str, tools: Any = None) -> Parsed:
        return Parsed(text, [FunctionCall("{}", "weather")])


@function_tool()
def weather() -> str:
    """The weather."""
    return "wet"


SETTINGS = (
    "actor_rollout_ref.rollout.multi_turn.enable=true",
    "actor_rollout_ref.rollout.multi_turn.format=tests.harness.every_answer.EveryAnswer",
    f"actor_rollout_ref.rollout.multi_turn.function_tool_path={__file__}",
    "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=3",
    "data.max_response_length=160",
    "actor_rollout_ref.actor.optim.lr=1e-3",
)
"""Conversations of three answers and two calls."""
