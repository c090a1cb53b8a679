"""The manager for functions of the whole batch, whose further keyword arguments come from ``reward.reward_kwargs``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from verl.rewards.forms import Form
from verl.rewards.managers.base import RewardManager
from verl.rewards.scoring import ScoringLimits

if TYPE_CHECKING:
    from verl.protocol.tokenizer import Tokenizer


class BatchRewardManager(RewardManager):
    """One call for the whole batch; a function of one answer is called row by row all the same.

    Args:
        reward_kwargs: extra keyword arguments of every call.
    """

    default_form = Form.BATCH

    def __init__(
        self,
        tokenizer: Tokenizer,
        num_examine: int,
        compute_score: Callable[..., Any] | None,
        reward_fn_key: str = "data_source",
        *,
        limits: ScoringLimits | None = None,
        **reward_kwargs: Any,
    ):
        super().__init__(
            tokenizer, num_examine, compute_score, reward_fn_key, reward_kwargs=reward_kwargs, limits=limits
        )
