"""The configuration: every default once, typed, with its meaning."""

from typing import TYPE_CHECKING, Any

from verl.config.loading.configuration import load_config, save_config
from verl.config.loading.recipes import Recipe
from verl.config.schema.actor import ActorConfig, CriticConfig, PolicyLossConfig, RefConfig
from verl.config.schema.algorithm import AlgoConfig, FilterGroupsConfig, KLControlConfig, RolloutCorrectionConfig
from verl.config.schema.data import DataConfig
from verl.config.schema.model import HFModelConfig
from verl.config.schema.node import ConfigNode, leaves, record_reads, replace, section, setting, to_dict, unread
from verl.config.schema.reward import RewardConfig
from verl.config.schema.role import (
    CheckpointConfig,
    FSDPEngineConfig,
    GlobalProfilerConfig,
    OptimizerConfig,
    ProfilerConfig,
)
from verl.config.schema.rollout import RolloutConfig, SamplingConfig
from verl.config.schema.root import ActorRolloutRefConfig, PPOTrainerConfig, TrainerConfig

if TYPE_CHECKING:
    from verl.config.schema.sft import DPOTrainerConfig, RMTrainerConfig, SFTDataConfig, SFTRunConfig, SFTTrainerConfig

FSDPOptimizerConfig = OptimizerConfig

__all__ = [
    "ActorConfig",
    "ActorRolloutRefConfig",
    "AlgoConfig",
    "CheckpointConfig",
    "ConfigNode",
    "CriticConfig",
    "DPOTrainerConfig",
    "DataConfig",
    "FSDPEngineConfig",
    "FSDPOptimizerConfig",
    "FilterGroupsConfig",
    "GlobalProfilerConfig",
    "HFModelConfig",
    "KLControlConfig",
    "OptimizerConfig",
    "PPOTrainerConfig",
    "PolicyLossConfig",
    "ProfilerConfig",
    "RMTrainerConfig",
    "Recipe",
    "RefConfig",
    "RewardConfig",
    "RolloutConfig",
    "RolloutCorrectionConfig",
    "SFTDataConfig",
    "SFTRunConfig",
    "SFTTrainerConfig",
    "SamplingConfig",
    "TrainerConfig",
    "leaves",
    "load_config",
    "record_reads",
    "replace",
    "save_config",
    "section",
    "setting",
    "to_dict",
    "unread",
]


def __getattr__(name: str) -> Any:
    """Sections of supervised runs, which RL runs do not load."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from verl.config.schema import sft

    return vars(sft)[name]
