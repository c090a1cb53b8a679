"""The configuration: every default once, typed, with its meaning."""

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
from verl.config.schema.root import ActorRolloutRefConfig, PPOTrainerConfig
from verl.config.schema.sft import DPOTrainerConfig, RMTrainerConfig, SFTDataConfig, SFTRunConfig, SFTTrainerConfig
from verl.config.schema.trainer import TrainerConfig

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
