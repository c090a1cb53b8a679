"""The whole configuration of an RL run, with the sections around it: the run, Ray, replay, the transfer queue."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from verl.config.schema.actor import ActorConfig, CriticConfig, RefConfig
from verl.config.schema.algorithm import AlgoConfig, DistillationConfig
from verl.config.schema.data import DataConfig
from verl.config.schema.model import HFModelConfig
from verl.config.schema.node import ABSENT, ConfigNode, from_mapping, replace, section, setting
from verl.config.schema.reward import JUDGE_ENGINES, RewardConfig
from verl.config.schema.role import GlobalProfilerConfig, RunConfig
from verl.config.schema.rollout import RolloutConfig
from verl.config.schema.tree import AHEAD, AMOUNT, COUNT, EVERY, GPUS, POSITIVE, SHARE, STEPS
from verl.registry import (
    ADVANTAGE_ESTIMATORS,
    POLICY_LOSSES,
    SCHEDULES,
    EstimatorFacts,
    LossFacts,
    ScheduleFacts,
)


@dataclass(frozen=True)
class ColocateAsyncConfig(ConfigNode):
    """Sampling ahead on the trainers' own devices."""

    num_warmup_batches: float = setting(
        1.0, "training batches that are sampled ahead; 1.5: one and a half", within=AHEAD
    )


@dataclass(frozen=True)
class SeparateAsyncConfig(ConfigNode):
    """Sampling ahead by samplers in a pool of their own."""

    num_warmup_batches: float = setting(
        1.0, "training batches that are sampled ahead; 1.5: one and a half", within=AHEAD
    )
    parameter_sync_step: int = setting(
        4,
        "mini-batches of a training step, after which weights are sent: data.train_batch_size / ppo_mini_batch_size",
        within=COUNT,
    )


@dataclass(frozen=True)
class QueueRulesConfig(ConfigNode):
    """Which groups a schedule with a queue trains on: a group is all samples of a prompt."""

    order: str = setting(
        "admission",
        "order of training on groups: admission (as sampling began: the same in every run) or completion (as it ended: "
        "none waits for a slow one, but quick answers come first)",
        upstream=ABSENT,
        choices=("admission", "completion"),
    )
    max_off_policy_threshold: int | None = setting(
        8,
        "largest staleness of a token that is trained on, in weight versions; null: no limit; fully_async takes its bound "
        "from async_training.staleness_threshold",
        within=AMOUNT,
    )
    max_off_policy_strategy: str = setting(
        "drop",
        "in order of completion, what happens to a group that would become staler than the bound: drop (counted), wait for it "
        "in time, or reweight: train on it, which requires a correction",
        choices=("drop", "wait", "reweight"),
    )


@dataclass(frozen=True)
class TrainerV1Config(ConfigNode):
    """The schedule: how sampling and training take turns."""

    trainer_mode: str = setting(
        "sync",
        "schedule of sampling and training: sync (in turn), one_step_off (a batch ahead), colocate_async, separate_async and "
        "fully_async (from a queue, see docs/howto/async.md), or the dotted path of a schedule",
    )
    colocate_async: ColocateAsyncConfig = section(ColocateAsyncConfig)
    separate_async: SeparateAsyncConfig = section(SeparateAsyncConfig)
    sampler: QueueRulesConfig = section(QueueRulesConfig)


@dataclass(frozen=True)
class AsyncTrainingConfig(ConfigNode):
    """The schedule fully_async: sampling and training as a stream."""

    staleness_threshold: float = setting(
        0.1,
        "share of a step's samples that may be sampled ahead, with older weights; 1.5: one and a half steps; rounded up, "
        "the largest staleness of a token in weight versions",
        upstream=ABSENT,
        within=AHEAD,
    )
    require_batches: int = setting(
        1,
        "mini-batches per chunk, which a step trains on as soon as it is complete",
        upstream=ABSENT,
        within=COUNT,
    )
    trigger_parameter_sync_step: int = setting(
        4,
        "chunks per step, after which weights are sent; metrics, checkpoints and validation count steps",
        upstream=ABSENT,
        within=COUNT,
    )
    total_rollout_steps: int | None = setting(
        None, "prompts after which the run ends, if not earlier; null: no limit", upstream=ABSENT, within=COUNT
    )
    concurrent_samples_per_replica: int = setting(
        16,
        "prompts in flight per replica, in every schedule with a queue whose samplers have their own pool",
        upstream=ABSENT,
        within=COUNT,
    )


@dataclass(frozen=True)
class TrainerConfig(RunConfig):
    """The run: its length, hardware, trackers, checkpoints and validation."""

    balance_batch: bool = setting(True, "split samples over processes so that each gets as many tokens")
    log_val_generations: int = setting(0, "validation samples that trackers show as a table", within=AMOUNT)
    rollout_data_dir: str | None = setting(
        None, "folder for the samples of every step as JSON lines; null: none", path=True
    )
    validation_data_dir: str | None = setting(
        None, "folder for the samples of every validation as JSON lines; null: none", path=True
    )
    rollout_data_tokens: float = setting(
        1.0,
        "share of the prompts whose samples are in rollout_data_dir with their tokens, log-probs, advantages and weight "
        "versions (<step>.parquet, for verl view); 0: no such files",
        upstream=ABSENT,
        within=SHARE,
    )
    rollout_data_max_bytes: int | None = setting(
        1 << 33,
        "bytes of these files beyond which the oldest are deleted; null: no bound",
        upstream=ABSENT,
        within=POSITIVE,
    )
    nnodes: int = setting(1, "number of machines", within=COUNT)
    n_gpus_per_node: int | None = setting(None, "processes per machine, one per GPU; null: 1", upstream=8, within=GPUS)
    resource_pools: dict = setting(
        {},
        "separate pools for roles (critic, ref, rm, rollout): {name: {roles: [critic], processes: "
        "[2]}}, one number per node; all other roles share trainer.nnodes x trainer.n_gpus_per_node",
        upstream=ABSENT,
    )
    ledger: bool = setting(
        True,
        "record in default_local_dir what became of every sample (journal.jsonl), and check at the end of the run that "
        "none was lost or trained on twice",
        upstream=ABSENT,
    )
    trace: bool = setting(
        True,
        "record in default_local_dir when each stage of a step began and ended (journal.jsonl), for a Gantt chart",
        upstream=ABSENT,
    )
    journal_max_bytes: int | None = setting(
        1 << 30,
        "bytes of the journal beyond which its oldest segments are dropped, each a sixteenth of it; never what a resume "
        "from the newest checkpoint needs; null: no bound",
        upstream=ABSENT,
        within=POSITIVE,
    )
    hang_seconds: float | None = setting(
        None,
        "end the run with an error after this many seconds without a stage's begin or end, a mini-batch or a token; it "
        "names the process that hangs (stacks: hang.txt); null: never; a judge that the run serves restarts after as many, "
        "or 600",
        upstream=ABSENT,
        within=POSITIVE,
    )
    max_restarts: int = setting(
        0,
        "times that a run which ended too early (a process was lost, an error) starts again by itself from its newest "
        "checkpoint; not after an error of settings, data or model, or one that comes twice at one checkpoint",
        upstream=ABSENT,
        within=AMOUNT,
        needs=".save_freq",
    )
    save_freq: int = setting(-1, "steps between checkpoints; -1: never", within=EVERY)
    esi_redundant_time: int = setting(
        0,
        "on an instance whose platform says when it ends, save if one more step and its save, plus these seconds, might "
        "end too late; needs save_freq",
        within=AMOUNT,
        needs=".save_freq",
    )
    checkpoint_callback_class: str | None = setting(
        None,
        "dotted path of a class (CheckpointCallback) that is called after each complete checkpoint; null: none",
        needs=".save_freq",
    )
    replay_from: str | None = setting(
        None,
        "default_local_dir of an asynchronous run, whose recorded decisions (journal.jsonl) this run takes "
        "again, for the same weights bit for bit; null: none",
        upstream=ABSENT,
        path=True,
    )
    val_before_train: bool = setting(True, "validate before the first step")
    val_only: bool = setting(False, "validate and stop")
    ref_update_freq: int | None = setting(
        None, "copy the actor's weights to the reference policy every n steps; null: never"
    )
    test_freq: int = setting(-1, "steps between validations; -1: only before training", within=EVERY)
    critic_warmup: int = setting(0, "first step that trains the policy; the critic trains from step 1", within=AMOUNT)
    del_local_ckpt_after_load: bool = setting(
        False,
        "delete the checkpoint that was resumed from, once a newer one is complete or its remote copy is",
        needs=".save_freq",
    )
    max_actor_ckpt_to_keep: int | None = setting(None, "number of actor checkpoints to keep; null: all", within=COUNT)
    max_critic_ckpt_to_keep: int | None = setting(None, "number of critic checkpoints to keep; null: all", within=COUNT)
    ray_wait_register_center_timeout: int = setting(300, "time limit for Ray workers to start, in seconds")
    use_v1: bool = setting(
        True,
        "which of two trainers runs",
        no_effect="there is one trainer; trainer.v1.trainer_mode names the schedule",
    )
    v1: TrainerV1Config = section(TrainerV1Config)
    wandb_proxy: str | None = setting(None, "proxy for wandb")
    remove_previous_ckpt_in_save: bool = setting(
        False, "keep the last checkpoint only", no_effect="use trainer.max_actor_ckpt_to_keep"
    )
    runtime: str = setting(
        "auto",
        "local (this process), ray, or auto: local for one process",
        upstream=ABSENT,
        choices=("auto", "local", "ray"),
    )
    seed: int = setting(1, "seed of the run", upstream=ABSENT)
    skip_old_log_prob: bool = setting(
        True,
        "skip the old-log-prob pass if one mini-batch and one epoch on the policy's own samples make it provably unused",
        upstream=False,
    )
    log_train_generations: int = setting(
        3,
        "training samples shown on the console, after the first step and then every test_freq steps",
        upstream=0,
        within=AMOUNT,
    )
    async_weight_update: bool = setting(
        False,
        "sync weights in the background, while the step is logged and saved and the next prompts are loaded",
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


def starts_judges(cfg: PPOTrainerConfig) -> bool:
    """Whether a run starts the servers of a language model that judges."""
    model = cfg.reward.reward_model
    return model.enable and model.rollout.name in JUDGE_ENGINES


def queries_judges(cfg: PPOTrainerConfig) -> bool:
    """Whether reward functions query a language model on servers that run."""
    model = cfg.reward.reward_model
    return model.enable and model.rollout.name in (*JUDGE_ENGINES, "server") and model.rollout.server.url is not None


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


TEACHER_POOL = "teacher_pool"
TEACHER_FIELDS = ("key", "model_path", "num_replicas", "inference")
"""What upstream's tree has of a teacher; the last two put it behind servers."""
TEACHER_ROWS = 32
"""In flight at each server of a teacher; ``inference.max_num_seqs`` changes it."""


@dataclass(frozen=True)
class Teacher:
    """A frozen model that scores some of the rows, as a role of the run or behind servers.

    Args:
        name: of the role, and in metrics.
        path: of the model.
        setting: the key of ``path``, for messages.
        serves: value of ``distillation.teacher_key`` in its rows; None: all rows that no other serves.
        pool: in which its role is placed, as ``trainer.resource_pools`` names it.
        strategy, fsdp, megatron, torchtitan: as the reference policy has them.
        inference: of its servers, as it was typed; ``name`` is the policy's where it was not.
        num_replicas: servers that the run starts.
        described: the description as it was typed.
    """

    name: str
    path: str
    setting: str
    serves: str | None
    strategy: str
    fsdp: Any
    megatron: Any
    torchtitan: Any = None
    pool: str = "teacher"
    inference: Mapping[str, Any] = field(default_factory=dict)
    num_replicas: int = 0
    described: Mapping[str, object] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Of its description."""
        return self.setting.removesuffix(".model_path")

    @property
    def is_served(self) -> bool:
        """Servers score its rows: those that ``inference.server.url`` names, or hosts that the run starts."""
        name, server = self.inference.get("name"), self.inference.get("server")
        has_url = isinstance(server, Mapping) and bool(server.get("url"))
        return has_url or name == "server" or (name == "hf" and self.num_replicas > 0)

    def servers(self, rollout: RolloutConfig) -> RolloutConfig:
        """The settings of its servers.

        Args:
            rollout: the policy's, whose lengths and dtype they have.

        Raises:
            ConfigError: one is unknown, or of another type; the key is relative to ``inference``.
        """
        like = {name: rollout[name] for name in ("dtype", "prompt_length", "response_length")}
        servers = from_mapping(RolloutConfig, {**like, "max_num_seqs": TEACHER_ROWS, **self.inference})
        return servers if servers.name != "sglang" else replace(servers, server=replace(servers.server, api="sglang"))


def teachers_of(cfg: PPOTrainerConfig) -> Iterator[Teacher]:
    """The teachers of a run whose settings `verl.config.rules.distillation` accepts."""
    ref, name_of_rollout = cfg.actor_rollout_ref.ref, cfg.actor_rollout_ref.rollout.name
    engine = "hf" if name_of_rollout == "server" else name_of_rollout
    for name, described in (cfg.distillation.teacher_models if cfg.distillation.enabled else {}).items():
        if isinstance(described, Mapping) and described.get("model_path"):
            inference, replicas = described.get("inference") or {}, described.get("num_replicas") or 0
            serves = described.get("key")
            yield Teacher(
                name=str(name) if str(name).startswith("teacher_") else f"teacher_{name}",
                path=str(described["model_path"]),
                setting=f"distillation.teacher_models.{name}.model_path",
                serves=None if serves is None else str(serves),
                strategy=ref.strategy,
                fsdp=ref.fsdp_config,
                megatron=ref.megatron,
                torchtitan=ref.torchtitan,
                inference={"name": engine, **(inference if isinstance(inference, Mapping) else {})},
                num_replicas=replicas if type(replicas) is int else 0,
                described=described,
            )


def teachers_in_roles(cfg: PPOTrainerConfig) -> list[Teacher]:
    """Those that run on training engines, as roles."""
    return [teacher for teacher in teachers_of(cfg) if not teacher.is_served]
