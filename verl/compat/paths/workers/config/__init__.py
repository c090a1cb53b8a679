"""Upstream's import path of the worker sections; the settings live in `verl.config`."""

from verl.config import (
    ActorConfig,
    CriticConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    OptimizerConfig,
    PolicyLossConfig,
    RolloutConfig,
    SamplingConfig,
)

__all__ = [
    "ActorConfig",
    "CriticConfig",
    "FSDPEngineConfig",
    "FSDPOptimizerConfig",
    "HFModelConfig",
    "OptimizerConfig",
    "PolicyLossConfig",
    "RolloutConfig",
    "SamplingConfig",
]
