"""The loop with tools under upstream's path; it lives in `verl.agent_loop.tool_agent`."""

from enum import Enum

from verl.agent_loop.agent_data import AgentData
from verl.agent_loop.tool_agent import ToolAgentLoop


class AgentState(Enum):
    """Upstream's states of a conversation; here a conversation is a coroutine and needs none."""

    PENDING, GENERATING, PROCESSING_TOOLS = "pending", "generating", "processing_tools"
    TERMINATED, INTERACTING = "terminated", "interacting"
