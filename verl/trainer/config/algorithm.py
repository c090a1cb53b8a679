"""Upstream's module of the algorithm section and of its rollout correction; the settings live in `verl.config`."""

from verl.config import AlgoConfig, FilterGroupsConfig, KLControlConfig, RolloutCorrectionConfig

__all__ = ["AlgoConfig", "FilterGroupsConfig", "KLControlConfig", "RolloutCorrectionConfig"]
