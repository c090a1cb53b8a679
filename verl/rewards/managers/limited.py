"""The manager for functions that query a service with quotas."""

from __future__ import annotations

from dataclasses import replace

from verl.rewards.managers.naive import NaiveRewardManager
from verl.rewards.scoring import ScoringLimits


class RateLimitedRewardManager(NaiveRewardManager):
    """Scores as the naive one does, one call at a time unless ``reward.max_concurrent`` is set.

    The quotas ``reward.max_rpm`` and ``reward.max_tpm`` hold with every manager.
    """

    def configure(self, limits: ScoringLimits) -> None:
        super().configure(replace(limits, max_concurrent=limits.max_concurrent or 1))
