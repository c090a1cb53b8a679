"""A checker as a tool: a model hands in its answer to a grade-school problem and learns whether it is right."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from verl.tools.base import BaseTool, Executed
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

SCHEMA = {
    "type": "function",
    "function": {
        "name": "calc_gsm8k_reward",
        "description": "Checks an answer to the problem: 1.0 if it is right, 0.0 if it is wrong.",
        "parameters": {
            "type": "object",
            "properties": {"answer": {"type": "string", "description": "The final answer, a number."}},
            "required": ["answer"],
        },
    },
}
NO_GAIN = -0.05
"""Step reward of an answer that is no better than the one before."""
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


class Gsm8kTool(BaseTool):
    """Keeps the best score of a trajectory; a row gives ``create_kwargs: {ground_truth: ...}``."""

    def __init__(
        self, config: Mapping[str, Any] | None, tool_schema: OpenAIFunctionToolSchema | Mapping[str, Any] | None = None
    ):
        super().__init__(config, tool_schema)
        self._truths: dict[str, str] = {}
        self._best: dict[str, float] = {}

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return self.tool_schema or OpenAIFunctionToolSchema.model_validate(SCHEMA)

    async def create(
        self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        if ground_truth is None:
            raise ValueError(f"the row gives no tools_kwargs.{self.name}.create_kwargs.ground_truth")
        name = instance_id or str(uuid.uuid4())
        self._truths[name], self._best[name] = str(ground_truth), 0.0
        return name, ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Executed:
        answer = str(parameters.get("answer", ""))
        score = float(same_number(answer, self._truths[instance_id]))
        gained = score > self._best[instance_id]
        self._best[instance_id] = max(score, self._best[instance_id])
        return ToolResponse(text=f"Current parsed answer={answer!r} reward={score}"), 0.0 if gained else NO_GAIN, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return self._best[instance_id]

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self._truths.pop(instance_id, None)
        self._best.pop(instance_id, None)


def same_number(answer: str, truth: str) -> bool:
    """Whether the last number in each is the same."""
    number, expected = last_number(answer), last_number(truth)
    return number is not None and number == expected


def last_number(text: str) -> Decimal | None:
    """The last number in a text; a comma groups digits."""
    numbers = _NUMBER.findall(text[-2000:])
    try:
        return Decimal(numbers[-1].replace(",", "")) if numbers else None
    except InvalidOperation:
        return None
