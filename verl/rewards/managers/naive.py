"""The manager for most runs: every answer is scored by the reward function, in whichever form that is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from verl.rewards.managers.base import RewardManager
from verl.rewards.scoring import ScoringLimits

if TYPE_CHECKING:
    from verl.protocol.tokenizer import Tokenizer


class NaiveRewardManager(RewardManager):
    """Scores row by row, or the batch at once if the function takes lists.

    Args:
        compute_score_timeout: seconds for one call of the function; it wins over ``limits.timeout``.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        num_examine: int,
        compute_score: Callable[..., Any] | None = None,
        reward_fn_key: str = "data_source",
        compute_score_timeout: float | None = None,
        *,
        limits: ScoringLimits | None = None,
    ):
        self._own_timeout = compute_score_timeout
        super().__init__(tokenizer, num_examine, compute_score, reward_fn_key, limits=limits)

    def configure(self, limits: ScoringLimits) -> None:
        super().configure(replace(limits, timeout=self._own_timeout) if self._own_timeout else limits)
