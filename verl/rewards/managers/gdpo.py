"""GDPO's manager [2601.05242]: every answer is scored as by the naive one, and its rewards must have names.

Which of them are normalised apart is said by ``algorithm.gdpo_reward_keys``.
"""

from __future__ import annotations

from verl.rewards.managers.naive import NaiveRewardManager
from verl.rewards.managers.rows import SampleRow
from verl.rewards.samples import RewardFailure, RewardResult

NAMELESS = "returned a score alone. Allowed: a dict with the key 'score' and one key for each reward."


class GDPORewardManager(NaiveRewardManager):
    """Refuses a score without named rewards, which the estimator ``gdpo`` could not tell apart."""

    def adjust(self, row: SampleRow, result: RewardResult) -> RewardResult:
        """A failure where the function named no reward."""
        return result if result.extra else RewardResult(failure=RewardFailure("value", NAMELESS))
