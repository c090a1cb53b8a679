"""The trust region of PPO-like losses, as the actor's configuration describes it."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.schema.actor import ActorConfig
from verl.errors import ConfigError


@dataclass(frozen=True)
class Clip:
    """The trust region of the ratio: [1 - low, 1 + high], and the dual-clip constant c > 1."""

    low: float = 0.2
    high: float = 0.2
    c: float = 3.0

    def __post_init__(self) -> None:
        if not self.c > 1.0:
            raise ConfigError(
                "the dual clip bounds the loss of a negative advantage at c times it, so c must be greater than 1",
                key="actor_rollout_ref.actor.clip_ratio_c",
                got=self.c,
            )

    @classmethod
    def of(cls, config: ActorConfig | None) -> Clip:
        """From an actor's configuration; a null ``clip_ratio_low`` or ``clip_ratio_high`` means ``clip_ratio``."""
        if config is None:
            return cls()
        low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
        high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
        return cls(float(low), float(high), float(config.clip_ratio_c))
