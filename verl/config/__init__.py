"""The configuration: every default once, typed, with its meaning."""

from verl.config.actor import ActorConfig, PolicyLossConfig, RefConfig
from verl.config.algorithm import AlgoConfig, FilterGroupsConfig, KLControlConfig
from verl.config.checkpoint import CheckpointConfig
from verl.config.correction import RolloutCorrectionConfig
from verl.config.critic import CriticConfig
from verl.config.data import DataConfig
from verl.config.engine import FSDPEngineConfig
from verl.config.loading import load_config, save_config
from verl.config.model import HFModelConfig
from verl.config.node import ConfigNode, leaves, record_reads, replace, section, setting, to_dict, unread
from verl.config.optim import OptimizerConfig
from verl.config.preference import DPOTrainerConfig, RMTrainerConfig
from verl.config.profiler import GlobalProfilerConfig, ProfilerConfig
from verl.config.recipes import Recipe
from verl.config.reward import RewardConfig
from verl.config.rollout import RolloutConfig, SamplingConfig
from verl.config.root import ActorRolloutRefConfig, PPOTrainerConfig
from verl.config.sft import SFTDataConfig, SFTRunConfig, SFTTrainerConfig
from verl.config.trainer import TrainerConfig

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
