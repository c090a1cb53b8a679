"""Sections around the run: distillation, transfer queue, Ray, replay."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.node import ABSENT, ConfigNode, section, setting


@dataclass(frozen=True)
class DistillationDistillationLossConfig(ConfigNode):
    """The loss between student and teacher."""

    loss_mode: str = setting(
        "k3", "kl (k1), abs, mse (k2), low_var_kl (k3) or forward_kl_topk", planned="on-policy distillation"
    )
    topk: int = setting(32, "forward_kl_topk: tokens of the teacher that count", planned="on-policy distillation")
    use_task_rewards: bool = setting(True, "keep the task's reward beside it", planned="on-policy distillation")
    distillation_loss_coef: float = setting(1.0, "weight of the loss", planned="on-policy distillation")
    loss_max_clamp: float | None = setting(
        None, "largest loss of a token; null: none", planned="on-policy distillation"
    )
    log_prob_min_clamp: float | None = setting(
        None, "smallest log-prob that counts; null: none", planned="on-policy distillation"
    )
    use_policy_gradient: bool = setting(
        False, "take it as a reward instead of a loss", planned="on-policy distillation"
    )
    policy_loss_mode: str = setting("vanilla", "policy loss of that reward", planned="on-policy distillation")
    clip_ratio: float = setting(0.2, "clip of that policy loss on both sides", planned="on-policy distillation")
    clip_ratio_low: float = setting(0.2, "its clip below", planned="on-policy distillation")
    clip_ratio_high: float = setting(0.2, "its clip above", planned="on-policy distillation")


@dataclass(frozen=True)
class DistillationTeacherModelsTeacherModelConfig(ConfigNode):
    """One teacher."""

    key: str | None = setting(
        None, "samples that this teacher serves, by their teacher_key", planned="on-policy distillation"
    )
    model_path: str | None = setting(
        None, "folder or hub name of the teacher", planned="on-policy distillation", path=True
    )
    num_replicas: int = setting(0, "replicas of its engine", planned="on-policy distillation")


@dataclass(frozen=True)
class DistillationTeacherModelsConfig(ConfigNode):
    """The teachers by name."""

    teacher_model: DistillationTeacherModelsTeacherModelConfig = section(DistillationTeacherModelsTeacherModelConfig)


@dataclass(frozen=True)
class DistillationConfig(ConfigNode):
    """On-policy distillation: the student samples, teachers score every token."""

    enabled: bool = setting(
        False, "sample with the student, let teachers score every token", planned="on-policy distillation"
    )
    distillation_loss: DistillationDistillationLossConfig = section(DistillationDistillationLossConfig)
    n_gpus_per_node: int = setting(8, "GPUs per node of the teachers' pool", planned="on-policy distillation")
    nnodes: int = setting(0, "nodes of the teachers' pool", planned="on-policy distillation")
    teacher_models: DistillationTeacherModelsConfig = section(DistillationTeacherModelsConfig)
    teacher_key: str = setting(
        "data_source", "column that says which teacher a sample gets", planned="on-policy distillation"
    )


@dataclass(frozen=True)
class TransferQueueMetricsConfig(ConfigNode):
    """Metrics of the transfer queue."""

    enabled: bool = setting(False, "serve metrics over HTTP", planned="the transfer queue")
    port: int = setting(0, "port; 0: any that is free", planned="the transfer queue")


@dataclass(frozen=True)
class TransferQueueBackendSimpleStorageConfig(ConfigNode):
    """Storage in worker memory."""

    total_storage_size: int = setting(100000, "samples that fit", planned="the transfer queue")
    num_data_storage_units: int = setting(8, "workers that store", planned="the transfer queue")


@dataclass(frozen=True)
class TransferQueueBackendMooncakeStoreConfig(ConfigNode):
    """Storage in Mooncake."""

    auto_init: bool = setting(False, "start the metadata server", planned="the transfer queue")
    metadata_server: str = setting("localhost:50123", "address of the metadata server", planned="the transfer queue")
    master_server_address: str = setting("localhost:50124", "address of the master", planned="the transfer queue")
    local_hostname: str = setting("localhost", "this host's name", planned="the transfer queue")
    protocol: str = setting("tcp", "tcp or rdma", planned="the transfer queue")
    global_segment_size: int = setting(4294967296, "bytes of shared memory per client", planned="the transfer queue")
    local_buffer_size: int = setting(1073741824, "bytes of buffer per client", planned="the transfer queue")
    device_name: str = setting("", "RDMA device", planned="the transfer queue")


@dataclass(frozen=True)
class TransferQueueBackendConfig(ConfigNode):
    """Where samples wait."""

    storage_backend: str = setting("SimpleStorage", "SimpleStorage or MooncakeStore", planned="the transfer queue")
    SimpleStorage: TransferQueueBackendSimpleStorageConfig = section(TransferQueueBackendSimpleStorageConfig)
    MooncakeStore: TransferQueueBackendMooncakeStoreConfig = section(TransferQueueBackendMooncakeStoreConfig)


@dataclass(frozen=True)
class TransferQueueConfig(ConfigNode):
    """A queue through which samples go from stage to stage."""

    enable: bool = setting(False, "use the queue", planned="the transfer queue")
    metrics: TransferQueueMetricsConfig = section(TransferQueueMetricsConfig)
    backend: TransferQueueBackendConfig = section(TransferQueueBackendConfig)


@dataclass(frozen=True)
class RayRayInitRuntimeEnvConfig(ConfigNode):
    """The environment of Ray's workers."""

    py_executable: str | None = setting(None, "Python interpreter of the workers; null: the controller's")


@dataclass(frozen=True)
class RayRayInitConfig(ConfigNode):
    """Arguments of ray.init."""

    address: str | None = setting(
        None,
        "cluster to join, host:port; null: RAY_ADDRESS, else what `ray start` left on this machine, else one of its own",
        upstream=ABSENT,
    )
    num_cpus: int | None = setting(None, "CPU cores of a cluster that the run starts itself; null: all")
    object_store_memory: int | None = setting(
        None, "bytes of shared memory for batches in such a cluster; null: Ray chooses", upstream=ABSENT
    )
    runtime_env: RayRayInitRuntimeEnvConfig = section(RayRayInitRuntimeEnvConfig)


@dataclass(frozen=True)
class RayConfig(ConfigNode):
    """The Ray runtime."""

    ray_init: RayRayInitConfig = section(RayRayInitConfig)
    timeline_json_file: str | None = setting(None, "file for Ray's timeline, written at the end", path=True)


@dataclass(frozen=True)
class SkipRolloutConfig(ConfigNode):
    """Replay of dumped samples, of one kind of run."""

    enable: bool = setting(False, "replay dumped samples", planned="replay of dumped rollouts")
    dump_dir: str = setting(
        "~/.verl/rollout_dump", "folder of the dumps", planned="replay of dumped rollouts", path=True
    )
    steps: list = setting([], "steps that are replayed", planned="replay of dumped rollouts")
    action: str = setting(
        "cache", "cache (dump where there is none yet) or repeat", planned="replay of dumped rollouts"
    )


@dataclass(frozen=True)
class SkipConfig(ConfigNode):
    """Replay of dumped samples instead of sampling."""

    rollout: SkipRolloutConfig = section(SkipRolloutConfig)
    rollout_tq: SkipRolloutConfig = section(SkipRolloutConfig)
    async_rollout: SkipRolloutConfig = section(SkipRolloutConfig)
