"""Upstream's import path of the agent loops; they live in `verl.agent_loop`."""

from verl.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register
from verl.agent_loop.single_turn import SingleTurnAgentLoop
from verl.agent_loop.tool_agent import ToolAgentLoop
from verl.experimental.agent_loop.agent_loop import AgentLoopManager, AgentLoopWorker
