"""Scoring while others are still being sampled: single results travel with the batch until the manager asks for them.

What is done early is the call of the reward function alone, on the sample that the manager would read from the whole
batch; penalties, failures and the place of a score stay with the manager. So the numbers are the same bits as those of
a batch that is scored at the end.
"""

from __future__ import annotations

from typing import Any

from verl.metrics import notice
from verl.protocol import DataProto
from verl.rewards import wire
from verl.rewards.managers.base import RewardManager
from verl.rewards.managers.loop import RewardManagerBase


class EarlyScorer:
    """Scores one row at a time for a manager of this process.

    Args:
        manager: whose reward function is called.
    """

    def __init__(self, manager: RewardManager | RewardManagerBase):
        self.manager = manager

    @classmethod
    def of(cls, manager: Any) -> EarlyScorer | None:
        """For a manager that scores row by row; None (with a notice) for one that needs the whole batch."""
        if isinstance(manager, RewardManagerBase) or (isinstance(manager, RewardManager) and manager.scores_rows):
            return cls(manager)
        notice(
            "reward.while_sampling",
            f"has no effect with {type(manager).__name__} and this reward function: the whole batch is scored at once, "
            "so it is scored after sampling",
        )
        return None

    async def score(self, row: DataProto) -> list[Any]:
        """The result for a batch of one row, as plain values. What the function does wrong is in the result."""
        return wire.pack_results([await self.manager.result_of_row(row)])[0]

    def close(self) -> None:
        """Stop processes and threads of the reward function."""
        self.manager.close()
