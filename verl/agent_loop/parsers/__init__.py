"""How each model family writes its tool calls, and how they are read back."""

from verl.agent_loop.parsers.base import FunctionCall, Malformed, Parsed, ToolParser

__all__ = ["FunctionCall", "Malformed", "Parsed", "ToolParser"]
