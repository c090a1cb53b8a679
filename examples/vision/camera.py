"""A tool that shows a picture, and the reward of the task that needs it: see ``make_data.py --camera``."""

from __future__ import annotations

from typing import Any

from verl.tools.base import BaseTool, Executed
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

SCHEMA = {"type": "function", "function": {"name": "camera", "description": "Shows what is in front of it."}}


class Camera(BaseTool):
    """Shows the picture of a row, ``tools_kwargs.camera.create_kwargs.picture``.

    With ``config.covered`` it shows none: what a model then says about the picture is a guess.
    """

    def __init__(self, config: Any, tool_schema: Any = None):
        super().__init__(config, tool_schema)
        self.pictures: dict[str, Any] = {}

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return OpenAIFunctionToolSchema.model_validate(SCHEMA)

    async def create(
        self, instance_id: str | None = None, picture: Any = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        name, answer = await super().create(instance_id)
        self.pictures[name] = picture
        return name, answer

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Executed:
        if self.config.get("covered"):
            return ToolResponse(text="?"), None, {}
        return ToolResponse(image=[self.pictures[instance_id]]), None, {}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self.pictures.pop(instance_id, None)


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, float]:
    """``score`` is 1 where the last turn is exactly the answer, else 0; ``looked``: whether the camera was used."""
    _, call, after = solution_str.rpartition("</tool_call>")
    said = after.rpartition("assistant\n")[2] if call else after
    return {"score": float(said.strip() == ground_truth), "looked": float(bool(call))}
