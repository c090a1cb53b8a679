"""What the sections ``trainer`` of RL and of supervised runs have in common."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.schema.node import ABSENT, ConfigNode, setting
from verl.config.schema.role import COPY_CHECK
from verl.config.schema.tree import COPIES, COUNT, POSITIVE


@dataclass(frozen=True)
class RunConfig(ConfigNode):
    """The name, length, trackers and checkpoints of a run."""

    project_name: str = setting("verl_examples", "project of the run, for trackers and folders")
    experiment_name: str = setting("gsm8k", "name of the run, for trackers and folders")
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
    total_epochs: int = setting(30, "passes over the training data", within=COUNT)
    total_training_steps: int | None = setting(None, "length of the run in steps; null: total_epochs", within=COUNT)
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
    copy_check_freq: int = setting(-1, COPY_CHECK, upstream=ABSENT, within=COPIES)
    best_metric: str | None = setting(
        None,
        "validation metric by which checkpoints are compared; the best one is never deleted, and best_checkpoint.json "
        "in the run's folder names it; null: none",
        upstream=ABSENT,
    )
    best_mode: str = setting(
        "max",
        "whether the larger (max) or smaller (min) value is better",
        upstream=ABSENT,
        choices=("max", "min"),
        needs=".best_metric",
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
    device: str | None = setting(
        None,
        "cuda, npu or cpu; null or auto: the accelerator if there is one",
        upstream="cuda",
        choices=("auto", "cuda", "npu", "cpu"),
    )
