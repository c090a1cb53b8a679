"""The contract of a tool: what a model can call, and what a trajectory keeps of it.

One object of a tool serves all trajectories of a process. What belongs to one trajectory is an *instance*, named by
an id: ``create`` makes it before the trajectory's first call, ``execute`` runs once per call (calls of one turn run
side by side), ``calc_reward`` is called once at the end, ``release`` follows in any case, also after a failure or
a time limit.

All of them run on one event loop in a thread of its own, which lives as long as the process (`verl.tools.runner`): a
tool may keep connections open between calls. A call that takes longer than ``multi_turn.tool_timeout`` is cancelled.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from verl.errors import ConfigError
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

Executed = tuple[ToolResponse, float | None, dict[str, Any]]
"""(answer, step reward or None, metrics) of one call."""


class BaseTool:
    """A tool; subclasses override `execute` and what else they need.

    Args:
        config: the tool's ``config`` in the YAML file.
        tool_schema: what the model is shown; without one, `get_openai_tool_schema` of the class supplies it.

    Raises:
        ConfigError: neither gives a schema.

    Example:
        >>> class Shout(BaseTool):
        ...     async def execute(self, instance_id, parameters, **kwargs):
        ...         return ToolResponse(text=parameters["text"].upper()), 0.0, {}
    """

    def __init__(
        self, config: Mapping[str, Any] | None, tool_schema: OpenAIFunctionToolSchema | Mapping[str, Any] | None = None
    ):
        self.config: dict[str, Any] = dict(config or {})
        self.tool_schema: OpenAIFunctionToolSchema | None = None
        if tool_schema is not None:
            self.tool_schema = OpenAIFunctionToolSchema.model_validate(tool_schema)
        self.tool_schema = OpenAIFunctionToolSchema.model_validate(self.get_openai_tool_schema())
        self.name: str = self.tool_schema.function.name

    @classmethod
    def from_config(cls, entry: Mapping[str, Any]) -> list[BaseTool]:
        """The tools of one entry of the YAML file; a class that stands for several (a server's) overrides this.

        Args:
            entry: the whole entry: ``class_name``, ``config``, ``tool_schema`` and whatever else it holds.
        """
        return [cls(entry.get("config"), entry.get("tool_schema"))]

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """What the model is shown; a class that knows its own schema overrides this."""
        if self.tool_schema is None:
            raise ConfigError(
                f"the tool {type(self).__name__} has no schema",
                key="tool_schema",
                fix="Give tool_schema in the YAML file, or override get_openai_tool_schema.",
            )
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Make an instance for one trajectory.

        Args:
            instance_id: its name; None makes one up.
            kwargs: the row's ``tools_kwargs[<tool name>]["create_kwargs"]``, each by its name; where the method takes
                any keyword, also all of them as ``create_kwargs``.
        """
        return instance_id or str(uuid.uuid4()), ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Executed:
        """Run one call.

        Args:
            parameters: the arguments as the model wrote them: JSON values, not validated.
            kwargs: the row's ``tools_kwargs[<tool name>]["execute_kwargs"]``, and ``agent_data`` where the method takes
                any keyword: messages, prompt tokens, turns of the trajectory so far.

        Returns:
            (answer, step reward or None, metrics). Numbers among the metrics are averaged over the batch. A reward of
            None says that the call earns nothing; 0.0 counts as one. An exception becomes an answer to the model that
            names it, and counts as a failed call.
        """
        return ToolResponse(text="Updated the tool state."), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float | None:
        """The reward for the state that the trajectory has brought the instance to; None if there is none."""
        return None

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Let go of an instance."""
        return None

    async def close(self) -> None:
        """Let go of what all instances share (processes, connections); called once, when the run ends."""
        return None
