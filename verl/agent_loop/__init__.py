"""From a prompt to a trajectory: one loop per row over the sampler; a single turn is the trivial loop."""

from verl.agent_loop.base import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register
from verl.agent_loop.client import SamplerClient
from verl.agent_loop.manager import AgentLoopManager
from verl.agent_loop.single_turn import SingleTurnAgentLoop

__all__ = [
    "AgentLoopBase",
    "AgentLoopManager",
    "AgentLoopMetrics",
    "AgentLoopOutput",
    "SamplerClient",
    "SingleTurnAgentLoop",
    "register",
]
