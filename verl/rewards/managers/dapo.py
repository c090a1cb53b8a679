"""DAPO's manager [2503.14476]: a soft punishment for answers that nearly fill the response; accuracy is separate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from verl.errors import ConfigError
from verl.rewards.managers.base import RewardManager
from verl.rewards.managers.rows import SampleRow
from verl.rewards.samples import RewardResult
from verl.rewards.scoring import ScoringLimits

if TYPE_CHECKING:
    from verl.protocol.tokenizer import Tokenizer

KEY = "reward.reward_kwargs.overlong_buffer_cfg"
FIELDS = ("enable", "len", "penalty_factor", "log")


@dataclass(frozen=True)
class OverlongBuffer:
    """The last ``length`` tokens before ``max_resp_len`` cost up to ``penalty_factor``, linearly."""

    max_resp_len: int
    length: int
    penalty_factor: float
    log: bool

    def penalty(self, response_length: int) -> float:
        """``min(-(l - (L_max - b)) / b * f, 0)``."""
        exceeded = response_length - (self.max_resp_len - self.length)
        return min(-exceeded / self.length * self.penalty_factor, 0.0)


def read_overlong_buffer(cfg: Any, max_resp_len: int | None) -> OverlongBuffer | None:
    """The buffer of a configuration, None where there is none or it is not enabled."""
    if cfg is None:
        return None
    values = dict(cfg.items()) if hasattr(cfg, "items") else dict(vars(cfg))
    unknown = [name for name in values if name not in FIELDS]
    if unknown:
        raise ConfigError("unknown setting", key=f"{KEY}.{unknown[0]}", allowed=FIELDS)
    if not values.get("enable", False):
        return None
    length, factor = values.get("len"), values.get("penalty_factor", 1.0)
    if not isinstance(length, int) or length < 1:
        raise ConfigError("must be at least 1 token", key=f"{KEY}.len", got=length)
    if max_resp_len is None or max_resp_len < length:
        raise ConfigError(
            "must be given and at least as long as the overlong buffer",
            key="reward.reward_kwargs.max_resp_len",
            got=max_resp_len,
            allowed=f"{length} or more",
        )
    if factor is None or factor < 0:
        raise ConfigError("must not be negative", key=f"{KEY}.penalty_factor", got=factor)
    return OverlongBuffer(max_resp_len, length, float(factor), bool(values.get("log", False)))


class DAPORewardManager(RewardManager):
    """Scores as the naive manager does, adds ``acc`` (the score before any penalty) and the overlong penalty.

    Args:
        max_resp_len: the longest possible response in tokens; needed where the buffer is enabled.
        overlong_buffer_cfg: ``{enable, len, penalty_factor, log}``.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        num_examine: int,
        compute_score: Callable[..., Any] | None = None,
        reward_fn_key: str = "data_source",
        max_resp_len: int | None = None,
        overlong_buffer_cfg: Any = None,
        *,
        limits: ScoringLimits | None = None,
    ):
        super().__init__(tokenizer, num_examine, compute_score, reward_fn_key, limits=limits)
        self.overlong_buffer = read_overlong_buffer(overlong_buffer_cfg, max_resp_len)

    def adjust(self, row: SampleRow, result: RewardResult) -> RewardResult:
        """Add ``acc`` and the penalty for the length; ``score`` in the details stays the function's own."""
        score = result.score or 0.0
        extra = {"acc": score, **result.extra}
        if self.overlong_buffer is not None:
            penalty = self.overlong_buffer.penalty(row.length)
            score += penalty
            if self.overlong_buffer.log:
                extra |= {"overlong_reward": penalty, "overlong": penalty < 0}
        return replace(result, score=score, extra=extra)
