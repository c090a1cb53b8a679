"""Upstream's import path of the worker sections; the settings live in `verl.config`."""

from verl.config import CriticConfig, RolloutConfig, SamplingConfig
from verl.workers.config.actor import ActorConfig, FSDPActorConfig, McoreActorConfig, PolicyLossConfig
from verl.workers.config.engine import FSDPEngineConfig, McoreEngineConfig
from verl.workers.config.model import HFModelConfig
from verl.workers.config.optimizer import FSDPOptimizerConfig, OptimizerConfig, build_optimizer

FSDPCriticConfig = McoreCriticConfig = CriticConfig
