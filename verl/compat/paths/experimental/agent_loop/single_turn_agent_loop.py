"""The loop of one answer under upstream's path."""

from verl.agent_loop.single_turn import SingleTurnAgentLoop
