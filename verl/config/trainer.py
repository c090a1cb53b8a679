"""Settings of the run."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.node import ConfigNode, section, setting


@dataclass(frozen=True)
class TrainerV1ColocateAsyncConfig(ConfigNode):
    """``trainer.v1.colocate_async``."""

    num_warmup_batches: int = setting(1, "prompt batches queued first", planned="asynchronous schedules")


@dataclass(frozen=True)
class TrainerV1SeparateAsyncHybridRolloutConfig(ConfigNode):
    """``trainer.v1.separate_async.hybrid_rollout``."""

    enable_switch: bool = setting(False, "lend idle trainer GPUs to rollout", planned="asynchronous schedules")
    switch_threshold_ratio: float = setting(0.4, "readiness share to reclaim them", planned="asynchronous schedules")
    adaptive_switch_threshold: bool = setting(True, "adapt the share", planned="asynchronous schedules")
    switch_threshold_step_up: float = setting(0.05, "step up", planned="asynchronous schedules")
    switch_threshold_step_down: float = setting(0.03, "step down", planned="asynchronous schedules")
    switch_threshold_release_steps: int = setting(2, "patience", planned="asynchronous schedules")
    switch_cost_window_size: int = setting(3, "averaging window", planned="asynchronous schedules")


@dataclass(frozen=True)
class TrainerV1SeparateAsyncConfig(ConfigNode):
    """``trainer.v1.separate_async``."""

    num_warmup_batches: int = setting(1, "prompt batches queued first", planned="asynchronous schedules")
    parameter_sync_step: int = setting(4, "mini-batches between weight syncs", planned="asynchronous schedules")
    hybrid_rollout: TrainerV1SeparateAsyncHybridRolloutConfig = section(TrainerV1SeparateAsyncHybridRolloutConfig)


@dataclass(frozen=True)
class TrainerV1SamplerCustomSamplerConfig(ConfigNode):
    """``trainer.v1.sampler.custom_sampler``."""

    path: str | None = setting(None, "custom sampler file", planned="asynchronous schedules", path=True)
    name: str | None = setting(None, "class", planned="asynchronous schedules")


@dataclass(frozen=True)
class TrainerV1SamplerConfig(ConfigNode):
    """``trainer.v1.sampler``."""

    max_off_policy_threshold: int = setting(
        8, "max policy versions a trajectory may span", planned="asynchronous schedules"
    )
    max_off_policy_strategy: str = setting("drop", "drop or wait", planned="asynchronous schedules")
    sync_refill_failed_groups: bool = setting(
        False, "replace failed groups in sync mode", planned="asynchronous schedules"
    )
    custom_sampler: TrainerV1SamplerCustomSamplerConfig = section(TrainerV1SamplerCustomSamplerConfig)
    sampler_kwargs: dict = setting({}, "args", planned="asynchronous schedules")


@dataclass(frozen=True)
class TrainerV1Config(ConfigNode):
    """``trainer.v1``."""

    trainer_mode: str = setting("sync", "sync, colocate_async, separate_async", planned="asynchronous schedules")
    colocate_async: TrainerV1ColocateAsyncConfig = section(TrainerV1ColocateAsyncConfig)
    separate_async: TrainerV1SeparateAsyncConfig = section(TrainerV1SeparateAsyncConfig)
    sampler: TrainerV1SamplerConfig = section(TrainerV1SamplerConfig)


@dataclass(frozen=True)
class TrainerConfig(ConfigNode):
    """The run: length, logging, checkpoints, hardware."""

    balance_batch: bool = setting(True, "even out tokens across DP ranks")
    total_epochs: int = setting(30, "epochs")
    total_training_steps: int | None = setting(None, "hard step count")
    project_name: str = setting("verl_examples", "tracker project")
    experiment_name: str = setting("gsm8k", "tracker run")
    logger: list = setting(["console", "file"], "list of backends (see 3.11)", upstream=["console", "wandb"])
    log_val_generations: int = setting(0, "validation samples logged as table")
    rollout_data_dir: str | None = setting(None, "JSONL dump of training rollouts", path=True)
    validation_data_dir: str | None = setting(None, "JSONL dump of validation", path=True)
    nnodes: int = setting(1, "nodes")
    n_gpus_per_node: int | None = setting(None, "GPUs per node", upstream=8)
    save_freq: int = setting(-1, "steps between checkpoints (-1 never)")
    esi_redundant_time: int = setting(0, "extra seconds for elastic-instance expiry save", planned="elastic instances")
    resume_mode: str = setting("auto", "auto, disable, resume_path", choices=("auto", "disable", "resume_path"))
    resume_from_path: str | None = setting(None, "folder containing global_step_N", path=True)
    checkpoint_callback_class: str | None = setting(
        None, "FQN of on_save hook (0.9.1+)", planned="checkpoint callbacks"
    )
    val_before_train: bool = setting(True, "validate first")
    val_only: bool = setting(False, "validate and stop")
    test_freq: int = setting(-1, "steps between validations (-1 never)")
    critic_warmup: int = setting(0, "critic-only steps")
    default_hdfs_dir: str | None = setting(None, "remote copy root", planned="remote checkpoints", path=True)
    del_local_ckpt_after_load: bool = setting(False, "delete after resume", planned="remote checkpoints")
    default_local_dir: str = setting(
        "checkpoints/${trainer.project_name}/${trainer.experiment_name}", "checkpoint root", path=True
    )
    max_actor_ckpt_to_keep: int | None = setting(None, "retention")
    max_critic_ckpt_to_keep: int | None = setting(None, "retention")
    ray_wait_register_center_timeout: int = setting(
        300, "worker registration timeout", no_effect="the local runtime registers no workers; Ray will use it"
    )
    device: str | None = setting(None, "cuda, npu, cpu...", upstream="cuda")
    use_v1: bool = setting(
        True,
        "new TransferQueue trainer (default since 0.9)",
        no_effect="there is one trainer; trainer.v1.trainer_mode names the schedule",
    )
    v1: TrainerV1Config = section(TrainerV1Config)
    wandb_proxy: str | None = setting(None, "proxy for wandb")
    remove_previous_ckpt_in_save: bool = setting(
        False, "deprecated: keep one checkpoint", no_effect="use trainer.max_actor_ckpt_to_keep"
    )
    runtime: str = setting("auto", "auto, local (this process) or ray", upstream=None, choices=("auto", "local", "ray"))
    seed: int = setting(1, "master seed of the run", upstream=None)
    skip_old_log_prob: bool = setting(
        True, "skip the old-log-prob pass where one mini-batch and one epoch make it provably unused", upstream=False
    )
    log_train_generations: int = setting(3, "sampled completions shown on the console", upstream=0)
    async_weight_update: bool = setting(
        False, "hand weights to the sampler while training goes on", planned="asynchronous weight updates"
    )
