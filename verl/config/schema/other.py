"""Sections around the run: distillation, transfer queue, Ray, replay."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.schema.bounds import STEPS
from verl.config.schema.node import ABSENT, ConfigNode, section, setting


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
        "on Ray, columns stay in the object store of the node that made them, and the controller holds references; "
        "false: they travel through the controller. One process needs neither",
    )
