"""Upstream's import path of the worker sections; the settings live in `verl.config`."""

from verl.config import (
    ActorConfig,
    CriticConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    OptimizerConfig,
    RolloutConfig,
)

__all__ = [
    "ActorConfig",
    "CriticConfig",
    "FSDPEngineConfig",
    "FSDPOptimizerConfig",
    "HFModelConfig",
    "OptimizerConfig",
    "RolloutConfig",
]
