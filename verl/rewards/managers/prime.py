"""The manager for scorers that are slow or dangerous: parallel processes, a time limit per answer, and a kill.

Upstream has two names for it, ``prime`` and ``remote``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from verl.rewards.managers.base import RewardManager
from verl.rewards.scoring import Isolation, ScoringLimits

if TYPE_CHECKING:
    from verl.protocol.tokenizer import Tokenizer


class PrimeRewardManager(RewardManager):
    """Scores in child processes, built-in scorers and async functions too.

    The function must stand at the top level of a file.
    """

    isolation: Isolation = "process"

    def __init__(
        self,
        tokenizer: Tokenizer,
        num_examine: int,
        compute_score: Callable[..., Any] | None = None,
        reward_fn_key: str = "data_source",
        *,
        limits: ScoringLimits | None = None,
    ):
        super().__init__(tokenizer, num_examine, compute_score, reward_fn_key, limits=limits)
