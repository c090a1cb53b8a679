"""Upstream's module of the tool-call parsers; they live in `verl.agent_loop.parsers`."""

from verl.agent_loop.parsers import FunctionCall, ToolParser
from verl.agent_loop.parsers.json_calls import HermesToolParser
