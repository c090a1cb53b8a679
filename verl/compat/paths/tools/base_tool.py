"""Upstream's module of the base class; it lives in `verl.tools.base`."""

from verl.tools.base import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
