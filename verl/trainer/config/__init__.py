"""Upstream's import path of the algorithm sections; the settings live in `verl.config`."""

from verl.config import AlgoConfig, CheckpointConfig, FilterGroupsConfig, KLControlConfig, RolloutCorrectionConfig

__all__ = ["AlgoConfig", "CheckpointConfig", "FilterGroupsConfig", "KLControlConfig", "RolloutCorrectionConfig"]
