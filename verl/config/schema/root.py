"""The whole configuration of an RL run, with the sections around it: Ray, replay, the transfer queue."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.schema.actor import ActorConfig, CriticConfig, RefConfig
from verl.config.schema.algorithm import AlgoConfig
from verl.config.schema.data import DataConfig
from verl.config.schema.distillation import DistillationConfig
from verl.config.schema.model import HFModelConfig
from verl.config.schema.node import ABSENT, ConfigNode, section, setting
from verl.config.schema.reward import RewardConfig
from verl.config.schema.role import GlobalProfilerConfig
from verl.config.schema.rollout import RolloutConfig
from verl.config.schema.trainer import AsyncTrainingConfig, TrainerConfig
from verl.config.schema.tree import STEPS
from verl.registry import (
    ADVANTAGE_ESTIMATORS,
    POLICY_LOSSES,
    SCHEDULES,
    EstimatorFacts,
    LossFacts,
    ScheduleFacts,
)


@dataclass(frozen=True)
class RayRayInitRuntimeEnvConfig(ConfigNode):
    """The environment of Ray's workers."""

    py_executable: str | None = setting(None, "Python interpreter of the workers; null: the controller's")
    env_vars: dict = setting({}, "environment variables of the workers", upstream=ABSENT)
    further: dict = setting(
        {}, "any other part of Ray's runtime environment (working_dir, pip, ...), by its name there", upstream=ABSENT
    )


@dataclass(frozen=True)
class RayRayInitConfig(ConfigNode):
    """Arguments of ray.init."""

    address: str | None = setting(
        None,
        "cluster to join, host:port; null: RAY_ADDRESS, else a cluster that `ray start` left on this machine, else a new one",
        upstream=ABSENT,
    )
    num_cpus: int | None = setting(None, "CPU cores of a new cluster; null: all")
    object_store_memory: int | None = setting(
        None, "object store of a new cluster, in bytes; null: Ray chooses", upstream=ABSENT
    )
    num_gpus: int | None = setting(None, "GPUs of such a cluster; null: all", upstream=ABSENT)
    further: dict = setting({}, "any other argument of ray.init, by its name there", upstream=ABSENT)
    runtime_env: RayRayInitRuntimeEnvConfig = section(RayRayInitRuntimeEnvConfig)


@dataclass(frozen=True)
class RayConfig(ConfigNode):
    """The Ray runtime."""

    ray_init: RayRayInitConfig = section(RayRayInitConfig)
    timeline_json_file: str | None = setting(None, "file for Ray's timeline, written at the end", path=True)


@dataclass(frozen=True)
class SkipRolloutConfig(ConfigNode):
    """Replay of sampled batches."""

    enable: bool = setting(
        False, "write the samples of chosen steps to files, and read them from there in later runs; for debugging"
    )
    dump_dir: str = setting(
        "~/.verl/rollout_dump", "folder of the files, with a subfolder per project and experiment", path=True
    )
    steps: list = setting([], "steps whose samples are written and replayed, counted from 1", within=STEPS)
    action: str = setting(
        "cache",
        "cache: other steps are sampled; repeat: steps after one with a file use the samples of the files in turn",
        choices=("cache", "repeat"),
    )


@dataclass(frozen=True)
class SkipConfig(ConfigNode):
    """Parts of a step that are left out."""

    rollout: SkipRolloutConfig = section(SkipRolloutConfig, needs=".enable=true")


@dataclass(frozen=True)
class TransferQueueConfig(ConfigNode):
    """Where the columns of a batch are between the stages of a step."""

    enable: bool = setting(
        False,
        "on Ray, columns stay in the object store of the node that made them; false: they travel through the controller. "
        "One process needs neither",
    )


@dataclass(frozen=True)
class ActorRolloutRefConfig(ConfigNode):
    """Policy, sampler and reference policy."""

    hybrid_engine: bool = setting(
        True,
        "colocate samplers with trainers; false: give them their own pool, rollout.nnodes x "
        "rollout.n_gpus_per_node or the pool of trainer.resource_pools that has the role rollout",
    )
    nccl_timeout: int = setting(600, "time-out of collectives, in seconds")
    model: HFModelConfig = section(HFModelConfig)
    actor: ActorConfig = section(ActorConfig)
    ref: RefConfig = section(RefConfig)
    rollout: RolloutConfig = section(RolloutConfig)


@dataclass(frozen=True)
class PPOTrainerConfig(ConfigNode):
    """Settings of ``python -m verl.trainer.main_ppo``."""

    actor_rollout_ref: ActorRolloutRefConfig = section(ActorRolloutRefConfig)
    critic: CriticConfig = section(CriticConfig)
    data: DataConfig = section(DataConfig)
    reward: RewardConfig = section(RewardConfig)
    algorithm: AlgoConfig = section(AlgoConfig)
    trainer: TrainerConfig = section(TrainerConfig)
    async_training: AsyncTrainingConfig = section(AsyncTrainingConfig)
    distillation: DistillationConfig = section(DistillationConfig, needs=".enabled=true")
    global_profiler: GlobalProfilerConfig = section(GlobalProfilerConfig)
    ray_kwargs: RayConfig = section(RayConfig)
    skip: SkipConfig = section(SkipConfig)
    transfer_queue: TransferQueueConfig = section(TransferQueueConfig)


def of_estimator(cfg: PPOTrainerConfig) -> EstimatorFacts:
    """What is known of the estimator."""
    return ADVANTAGE_ESTIMATORS.facts(cfg.algorithm.adv_estimator)


def of_loss(cfg: PPOTrainerConfig) -> LossFacts:
    """What is known of the policy loss."""
    return POLICY_LOSSES.facts(cfg.actor_rollout_ref.actor.policy_loss.loss_mode)


def of_schedule(cfg: PPOTrainerConfig) -> ScheduleFacts:
    """What is known of the schedule."""
    return SCHEDULES.facts(cfg.trainer.v1.trainer_mode)


def uses_critic(cfg: PPOTrainerConfig) -> bool:
    """``critic.enable`` where it is set, else whether the estimator reads values."""
    return cfg.critic.enable if cfg.critic.enable is not None else of_estimator(cfg).values


def learns_from_pairs(cfg: PPOTrainerConfig) -> bool:
    """Whether the actor learns from the best and the worst answer to each prompt."""
    return of_loss(cfg).pairs


def learns_from_teachers_alone(cfg: PPOTrainerConfig) -> bool:
    """Whether no reward enters the loss (``distillation.distillation_loss.use_task_rewards=false``)."""
    return cfg.distillation.enabled and not cfg.distillation.distillation_loss.use_task_rewards


def corrects_rollout(cfg: PPOTrainerConfig) -> bool:
    """Whether the sampler's log-probs are compared with recomputed ones, for weights, rejection or metrics."""
    algorithm, newer = cfg.algorithm, cfg.algorithm.rollout_correction
    if newer.bypass_mode:
        return False
    return algorithm.rollout_is_threshold is not None or newer.rollout_is is not None or newer.rollout_rs is not None


def updates_once(cfg: PPOTrainerConfig) -> bool:
    """One mini-batch and one epoch: the policy is where it was, so its own detached log-probs are the old ones.

    Not so where the old policy is the sampler, nor where samples of older versions are trained on, nor with
    ``trainer.skip_old_log_prob=false``.
    """
    actor = cfg.actor_rollout_ref.actor
    one_update = actor.ppo_epochs == 1 and actor.ppo_mini_batch_size >= cfg.data.train_batch_size
    on_policy = not (sampler_is_old_policy(cfg) or trains_on_older(cfg))
    return one_update and on_policy and cfg.trainer.skip_old_log_prob


def trains_on_older(cfg: PPOTrainerConfig) -> bool:
    """Samples, or parts of them, may be of older versions of the policy: by the schedule, or from an earlier step."""
    return of_schedule(cfg).off_policy or cfg.actor_rollout_ref.rollout.keep_unfinished


def sampler_is_old_policy(cfg: PPOTrainerConfig) -> bool:
    """The loss takes the sampler's log-probs as the old ones, each token's by the version that drew it."""
    return cfg.actor_rollout_ref.actor.use_rollout_log_probs or cfg.algorithm.rollout_correction.bypass_mode


def skips_old_log_prob(cfg: PPOTrainerConfig) -> bool:
    """Whether the pass over old log-probs is left out.

    That is so in the bypass mode, and where the loss does not read them (it is on pairs, or reads the sampler's, or the
    policy `updates_once`) and nothing else does before.
    """
    if cfg.algorithm.rollout_correction.bypass_mode:
        return True
    read = cfg.algorithm.use_kl_in_reward or of_estimator(cfg).old_log_probs or corrects_rollout(cfg)
    return (updates_once(cfg) or learns_from_pairs(cfg) or sampler_is_old_policy(cfg)) and not read


def uses_reference(cfg: PPOTrainerConfig) -> bool:
    """A KL term in the loss or in the reward needs the reference policy, and so does a loss on pairs."""
    return cfg.actor_rollout_ref.actor.use_kl_loss or cfg.algorithm.use_kl_in_reward or learns_from_pairs(cfg)


def kl_kinds(cfg: PPOTrainerConfig) -> dict[str, str]:
    """Key -> kind of every KL to the reference that this run computes."""
    actor, algorithm = cfg.actor_rollout_ref.actor, cfg.algorithm
    in_loss = {"actor_rollout_ref.actor.kl_loss_type": actor.kl_loss_type} if actor.use_kl_loss else {}
    return in_loss | ({"algorithm.kl_penalty": algorithm.kl_penalty} if algorithm.use_kl_in_reward else {})


def reads_ref_log_prob(cfg: PPOTrainerConfig) -> bool:
    """Some KL is estimated from sampled tokens, or the reference policy serves another end."""
    kinds = kl_kinds(cfg).values()
    return not kinds or learns_from_pairs(cfg) or any(kind != "full" for kind in kinds)


def uses_reward_model(cfg: PPOTrainerConfig) -> bool:
    """Whether a reward model scores samples as a role; the reward function queries one on a server instead.

    A schedule may hold it as a role of its own.
    """
    model = cfg.reward.reward_model
    return model.enable and model.rollout.name == "hf" and not of_schedule(cfg).reward_model


def candidate_prompts(data: DataConfig, prompts: int) -> int:
    """Groups among which a step, or a part of one, chooses those of ``prompts`` that it trains on."""
    return int(prompts * data.oversample_factor)


def prompts_at_once(data: DataConfig) -> int:
    """Prompts that are sampled together."""
    return data.gen_batch_size or candidate_prompts(data, data.train_batch_size)


def key_of_prompts_at_once(cfg: PPOTrainerConfig) -> str:
    """The setting that says how many, for messages."""
    if cfg.trainer.v1.trainer_mode == "fully_async":  # where the number of prompts follows from these
        return "async_training.require_batches x actor_rollout_ref.actor.ppo_mini_batch_size"
    return "data.gen_batch_size" if cfg.data.gen_batch_size else "data.train_batch_size"
