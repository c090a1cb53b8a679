"""Upstream's module of the agent loops; they live in `verl.agent_loop`.

Upstream makes a manager from the whole configuration and a client of the sampler; these two classes take the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from verl.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register
from verl.agent_loop import AgentLoopManager as Manager
from verl.data import tokenizer_of
from verl.errors import NotBuiltError


class AgentLoopManager(Manager):
    """All loops of a run.

    Args:
        config: the configuration of ``main_ppo``.
        llm_client: the sampler (`verl.rollout.base.Sampler`).

    Raises:
        NotBuiltError: a teacher, or workers that score, are given.
    """

    def __init__(
        self, config: Any, llm_client: Any, teacher_client: None = None, reward_loop_worker_handles: None = None
    ):
        if teacher_client is not None:
            raise NotBuiltError("a teacher beside the agent loops is not built yet", key="teacher_client")
        if reward_loop_worker_handles is not None:
            fix = "Leave it out; a manager takes score=, a function that scores a trajectory when it ends."
            raise NotBuiltError(
                "reward workers are not handed to agent loops", key="reward_loop_worker_handles", fix=fix
            )
        tokenizer = tokenizer_of(config.actor_rollout_ref.model)
        super().__init__(config.actor_rollout_ref.rollout, llm_client, tokenizer, data_config=config.data)


class AgentLoopWorker(AgentLoopManager):
    """Upstream's worker of one process; here the manager runs all loops itself."""


async def get_trajectory_info(step: int, index: Sequence[int], validate: bool) -> list[dict[str, Any]]:
    """What names each row in a trace: step, prompt, which of the prompt's samples, and whether it validates."""
    seen: Counter[int] = Counter()
    rows = []
    for sample in index:
        rows.append({"step": step, "sample_index": sample, "rollout_n": seen[sample], "validate": validate})
        seen[sample] += 1
    return rows
