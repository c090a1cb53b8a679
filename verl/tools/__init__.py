"""What a model can call during a rollout: the contract of a tool, functions as tools, and the built-in ones."""

from verl.tools.base import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

__all__ = ["BaseTool", "OpenAIFunctionToolSchema", "ToolResponse"]
