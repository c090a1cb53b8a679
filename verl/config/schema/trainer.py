"""Settings of the run."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.schema.node import ABSENT, ConfigNode, section, setting
from verl.config.schema.role import COPY_CHECK
from verl.config.schema.tree import AHEAD, AMOUNT, COPIES, COUNT, EVERY, GPUS, POSITIVE


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
class TrainerConfig(ConfigNode):
    """The run: its length, hardware, trackers, checkpoints and validation."""

    balance_batch: bool = setting(True, "split samples over processes so that each gets as many tokens")
    total_epochs: int = setting(30, "passes over the training data", within=COUNT)
    total_training_steps: int | None = setting(None, "length of the run in steps; null: total_epochs", within=COUNT)
    project_name: str = setting("verl_examples", "project of the run, for trackers and folders")
    experiment_name: str = setting("gsm8k", "name of the run, for trackers and folders")
    logger: list = setting(
        ["console", "file"],
        "trackers: console, file (JSON lines), tensorboard, wandb, or dotted paths",
        upstream=["console", "wandb"],
    )
    console: str = setting(
        "auto",
        "what console prints of a step: table, line (all metrics) or both; auto: a table in a terminal, else a line",
        choices=("auto", "table", "line", "both"),
        upstream=ABSENT,
    )
    log_val_generations: int = setting(0, "validation samples that trackers show as a table", within=AMOUNT)
    rollout_data_dir: str | None = setting(
        None, "folder for the samples of every step as JSON lines; null: none", path=True
    )
    validation_data_dir: str | None = setting(
        None, "folder for the samples of every validation as JSON lines; null: none", path=True
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
        "names the process that hangs (stacks: hang.txt); null: never",
        upstream=ABSENT,
        within=POSITIVE,
    )
    save_freq: int = setting(-1, "steps between checkpoints; -1: never", within=EVERY)
    copy_check_freq: int = setting(-1, COPY_CHECK, upstream=ABSENT, within=COPIES)
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
    resume_mode: str = setting(
        "auto",
        "auto: resume from the last checkpoint, if any; resume_path: from resume_from_path; disable: start from scratch",
        choices=("auto", "disable", "resume_path"),
    )
    resume_from_path: str | None = setting(
        None,
        "folder of a step (.../global_step_20) for resume_mode=resume_path",
        path=True,
        needs=".resume_mode=resume_path",
    )
    resume_changed: str = setting(
        "refuse",
        "resuming with settings, data or files that change the results: refuse or accept",
        choices=("refuse", "accept"),
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
    default_local_dir: str = setting(
        "checkpoints/${trainer.project_name}/${trainer.experiment_name}",
        "folder of the run: checkpoints and the resolved configuration",
        path=True,
    )
    default_hdfs_dir: str | None = setting(
        None,
        "remote folder (hdfs://, s3://, gs://, ..., or a mounted path) to which each complete checkpoint is copied; "
        "resume_mode=auto takes the newer of the two; null: none",
        path=True,
    )
    remote_timeout: float = setting(
        300.0,
        "time limit of one request to default_hdfs_dir, in seconds; the copy of a file has a second more for each 10 MB",
        upstream=ABSENT,
        within=POSITIVE,
        needs=".default_hdfs_dir",
    )
    del_local_ckpt_after_load: bool = setting(
        False,
        "delete the checkpoint that was resumed from, once a newer one is complete or its remote copy is",
        needs=".save_freq",
    )
    max_actor_ckpt_to_keep: int | None = setting(None, "number of actor checkpoints to keep; null: all", within=COUNT)
    max_critic_ckpt_to_keep: int | None = setting(None, "number of critic checkpoints to keep; null: all", within=COUNT)
    ray_wait_register_center_timeout: int = setting(300, "time limit for Ray workers to start, in seconds")
    device: str | None = setting(
        None,
        "cuda, npu or cpu; null or auto: the accelerator if there is one",
        upstream="cuda",
        choices=("auto", "cuda", "npu", "cpu"),
    )
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
