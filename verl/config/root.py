"""The whole configuration of an RL run."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.actor import ActorConfig, RefConfig
from verl.config.algorithm import AlgoConfig
from verl.config.critic import CriticConfig
from verl.config.data import DataConfig
from verl.config.model import HFModelConfig
from verl.config.node import ConfigNode, section, setting
from verl.config.other import DistillationConfig, RayConfig, SkipConfig, TransferQueueConfig
from verl.config.profiler import GlobalProfilerConfig
from verl.config.reward import RewardConfig
from verl.config.rollout import RolloutConfig
from verl.config.trainer import TrainerConfig


@dataclass(frozen=True)
class ActorRolloutRefConfig(ConfigNode):
    """Policy, sampler and reference policy."""

    hybrid_engine: bool = setting(
        True, "actor and rollout share the same devices", planned="actor and rollout on separate GPUs"
    )
    nccl_timeout: int = setting(600, "seconds after which a process that its peers wait for is an error")
    model: HFModelConfig = section(HFModelConfig)
    actor: ActorConfig = section(ActorConfig)
    ref: RefConfig = section(RefConfig)
    rollout: RolloutConfig = section(RolloutConfig)


@dataclass(frozen=True)
class PPOTrainerConfig(ConfigNode):
    """Everything ``python -m verl.trainer.main_ppo`` can be told."""

    actor_rollout_ref: ActorRolloutRefConfig = section(ActorRolloutRefConfig)
    critic: CriticConfig = section(CriticConfig)
    data: DataConfig = section(DataConfig)
    reward: RewardConfig = section(RewardConfig)
    algorithm: AlgoConfig = section(AlgoConfig)
    trainer: TrainerConfig = section(TrainerConfig)
    global_profiler: GlobalProfilerConfig = section(GlobalProfilerConfig)
    distillation: DistillationConfig = section(DistillationConfig)
    transfer_queue: TransferQueueConfig = section(TransferQueueConfig)
    skip: SkipConfig = section(SkipConfig)
    ray_kwargs: RayConfig = section(RayConfig)


def uses_critic(cfg: PPOTrainerConfig) -> bool:
    """``critic.enable`` where it is set, else the estimator decides: only gae needs values."""
    return cfg.critic.enable if cfg.critic.enable is not None else cfg.algorithm.adv_estimator == "gae"


def uses_reference(cfg: PPOTrainerConfig) -> bool:
    """A KL term in the loss or in the reward needs the reference policy."""
    return cfg.actor_rollout_ref.actor.use_kl_loss or cfg.algorithm.use_kl_in_reward
