"""Sections around the run: distillation, transfer queue, Ray, replay."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.node import ConfigNode, section, setting


@dataclass(frozen=True)
class DistillationDistillationLossConfig(ConfigNode):
    """``distillation.distillation_loss``."""

    loss_mode: str = setting(
        "k3", "kl/k1, abs, mse/k2, low_var_kl/k3, forward_kl_topk", planned="on-policy distillation"
    )
    topk: int = setting(32, "k for top-k loss", planned="on-policy distillation")
    use_task_rewards: bool = setting(True, "mix with RL reward", planned="on-policy distillation")
    distillation_loss_coef: float = setting(1.0, "weight", planned="on-policy distillation")
    loss_max_clamp: float | None = setting(None, "clamp loss", planned="on-policy distillation")
    log_prob_min_clamp: float | None = setting(None, "clamp log-probs", planned="on-policy distillation")
    use_policy_gradient: bool = setting(False, "treat as reward instead of loss", planned="on-policy distillation")
    policy_loss_mode: str = setting("vanilla", "policy loss then used", planned="on-policy distillation")
    clip_ratio: float = setting(0.2, "clip", planned="on-policy distillation")
    clip_ratio_low: float = setting(0.2, "clip", planned="on-policy distillation")
    clip_ratio_high: float = setting(0.2, "clip", planned="on-policy distillation")


@dataclass(frozen=True)
class DistillationTeacherModelsTeacherModelConfig(ConfigNode):
    """``distillation.teacher_models.teacher_model``."""

    key: str | None = setting(None, "which samples this teacher serves", planned="on-policy distillation")
    model_path: str | None = setting(None, "teacher weights", planned="on-policy distillation", path=True)
    num_replicas: int = setting(0, "replicas", planned="on-policy distillation")


@dataclass(frozen=True)
class DistillationTeacherModelsConfig(ConfigNode):
    """``distillation.teacher_models``."""

    teacher_model: DistillationTeacherModelsTeacherModelConfig = section(DistillationTeacherModelsTeacherModelConfig)


@dataclass(frozen=True)
class DistillationConfig(ConfigNode):
    """On-policy distillation."""

    enabled: bool = setting(False, "on-policy distillation", planned="on-policy distillation")
    distillation_loss: DistillationDistillationLossConfig = section(DistillationDistillationLossConfig)
    n_gpus_per_node: int = setting(8, "teacher pool", planned="on-policy distillation")
    nnodes: int = setting(0, "teacher pool", planned="on-policy distillation")
    teacher_models: DistillationTeacherModelsConfig = section(DistillationTeacherModelsConfig)
    teacher_key: str = setting(
        "data_source", "field used to route samples to teachers", planned="on-policy distillation"
    )


@dataclass(frozen=True)
class TransferQueueMetricsConfig(ConfigNode):
    """``transfer_queue.metrics``."""

    enabled: bool = setting(False, "HTTP /metrics", planned="the transfer queue")
    port: int = setting(0, "port (0 auto)", planned="the transfer queue")


@dataclass(frozen=True)
class TransferQueueBackendSimpleStorageConfig(ConfigNode):
    """``transfer_queue.backend.SimpleStorage``."""

    total_storage_size: int = setting(100000, "sample capacity", planned="the transfer queue")
    num_data_storage_units: int = setting(8, "storage actors", planned="the transfer queue")


@dataclass(frozen=True)
class TransferQueueBackendMooncakeStoreConfig(ConfigNode):
    """``transfer_queue.backend.MooncakeStore``."""

    auto_init: bool = setting(False, "start metadata server", planned="the transfer queue")
    metadata_server: str = setting("localhost:50123", "address", planned="the transfer queue")
    master_server_address: str = setting("localhost:50124", "address", planned="the transfer queue")
    local_hostname: str = setting("localhost", "host", planned="the transfer queue")
    protocol: str = setting("tcp", "tcp or rdma", planned="the transfer queue")
    global_segment_size: int = setting(4294967296, "bytes per client", planned="the transfer queue")
    local_buffer_size: int = setting(1073741824, "bytes per client", planned="the transfer queue")
    device_name: str = setting("", "RDMA device", planned="the transfer queue")


@dataclass(frozen=True)
class TransferQueueBackendConfig(ConfigNode):
    """``transfer_queue.backend``."""

    storage_backend: str = setting("SimpleStorage", "simpleStorage or MooncakeStore", planned="the transfer queue")
    SimpleStorage: TransferQueueBackendSimpleStorageConfig = section(TransferQueueBackendSimpleStorageConfig)
    MooncakeStore: TransferQueueBackendMooncakeStoreConfig = section(TransferQueueBackendMooncakeStoreConfig)


@dataclass(frozen=True)
class TransferQueueConfig(ConfigNode):
    """The data plane of upstream's v1 trainer."""

    enable: bool = setting(False, "forced True by the v1 trainer", planned="the transfer queue")
    metrics: TransferQueueMetricsConfig = section(TransferQueueMetricsConfig)
    backend: TransferQueueBackendConfig = section(TransferQueueBackendConfig)


@dataclass(frozen=True)
class RayRayInitRuntimeEnvConfig(ConfigNode):
    """``ray_kwargs.ray_init.runtime_env``."""

    py_executable: str | None = setting(None, "interpreter for workers", planned="the Ray runtime")


@dataclass(frozen=True)
class RayRayInitConfig(ConfigNode):
    """``ray_kwargs.ray_init``."""

    num_cpus: int | None = setting(None, "fix CPU count (SLURM)", planned="the Ray runtime")
    runtime_env: RayRayInitRuntimeEnvConfig = section(RayRayInitRuntimeEnvConfig)


@dataclass(frozen=True)
class RayConfig(ConfigNode):
    """The Ray runtime."""

    ray_init: RayRayInitConfig = section(RayRayInitConfig)
    timeline_json_file: str | None = setting(None, "ray timeline dump", planned="the Ray runtime", path=True)


@dataclass(frozen=True)
class SkipRolloutConfig(ConfigNode):
    """``skip.rollout``."""

    enable: bool = setting(False, "replay dumped rollouts", planned="replay of dumped rollouts")
    dump_dir: str = setting("~/.verl/rollout_dump", "dump folder", planned="replay of dumped rollouts", path=True)
    steps: list = setting([], "steps to skip", planned="replay of dumped rollouts")
    action: str = setting("cache", "cache or repeat", planned="replay of dumped rollouts")


@dataclass(frozen=True)
class SkipRolloutTqConfig(ConfigNode):
    """``skip.rollout_tq``."""

    enable: bool = setting(False, "replay dumped rollouts", planned="replay of dumped rollouts")
    dump_dir: str = setting("~/.verl/rollout_dump", "dump folder", planned="replay of dumped rollouts", path=True)
    steps: list = setting([], "steps to skip", planned="replay of dumped rollouts")
    action: str = setting("cache", "cache or repeat", planned="replay of dumped rollouts")


@dataclass(frozen=True)
class SkipAsyncRolloutConfig(ConfigNode):
    """``skip.async_rollout``."""

    enable: bool = setting(False, "replay dumped rollouts", planned="replay of dumped rollouts")
    dump_dir: str = setting("~/.verl/rollout_dump", "dump folder", planned="replay of dumped rollouts", path=True)
    steps: list = setting([], "steps to skip", planned="replay of dumped rollouts")
    action: str = setting("cache", "cache or repeat", planned="replay of dumped rollouts")


@dataclass(frozen=True)
class SkipConfig(ConfigNode):
    """Replay of dumped rollouts."""

    rollout: SkipRolloutConfig = section(SkipRolloutConfig)
    rollout_tq: SkipRolloutTqConfig = section(SkipRolloutTqConfig)
    async_rollout: SkipAsyncRolloutConfig = section(SkipAsyncRolloutConfig)
