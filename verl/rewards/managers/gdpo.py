"""GDPO's manager [2601.05242]: every answer is scored as by the naive one, and its rewards must have names.

``algorithm.gdpo_reward_keys`` names those that are normalised separately.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from verl.rewards.managers.naive import NaiveRewardManager
from verl.rewards.managers.rows import SampleRow
from verl.rewards.samples import RewardFailure, RewardResult
from verl.rewards.scoring import ScoringLimits

if TYPE_CHECKING:
    from verl.config.schema.node import SettingsSource
    from verl.protocol.tokenizer import Tokenizer

NAMELESS = "returned a score alone. Allowed: a dict with the key 'score' and one key for each reward."


class GDPORewardManager(NaiveRewardManager):
    """Refuses a score without the named rewards, which the estimator ``gdpo`` could not separate.

    Args:
        config: the whole configuration, for ``algorithm.gdpo_reward_keys``; None asks for any names.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        num_examine: int,
        compute_score: Callable[..., Any] | None = None,
        reward_fn_key: str = "data_source",
        compute_score_timeout: float | None = None,
        config: SettingsSource | None = None,
        *,
        limits: ScoringLimits | None = None,
    ):
        super().__init__(tokenizer, num_examine, compute_score, reward_fn_key, compute_score_timeout, limits=limits)
        self._keys = tuple(getattr(getattr(config, "algorithm", None), "gdpo_reward_keys", None) or ())

    def adjust(self, row: SampleRow, result: RewardResult) -> RewardResult:
        """A failure where the function left out a reward; a call that failed and has the score 0 has all rewards 0."""
        if result.caught is not None:
            return replace(result, extra={**dict.fromkeys(self._keys, 0.0), **result.extra})
        if not result.extra:
            return RewardResult(failure=RewardFailure("value", NAMELESS))
        returned = {"score": result.score, **result.extra}
        missing = [key for key in self._keys if not _is_number(returned.get(key))]
        if not missing:
            return result
        lacks = f"returned no number under {missing[0]!r}, which algorithm.gdpo_reward_keys names"
        return RewardResult(failure=RewardFailure("value", f"{lacks}. It returned {', '.join(sorted(returned))}."))


def _is_number(value: Any) -> bool:
    try:
        return math.isfinite(float(value))
    except (TypeError, ValueError):
        return False
