"""Settings of rewards."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.node import ConfigNode, section, setting


@dataclass(frozen=True)
class CustomRewardFunctionConfig(ConfigNode):
    """``reward.custom_reward_function``."""

    path: str | None = setting(None, "file with the scorer", path=True)
    name: str | None = setting(None, "function in it (extra: reward_kwargs dict)", upstream="compute_score")
    reward_kwargs: dict = setting({}, "extra keyword arguments of every call of the scorer")


@dataclass(frozen=True)
class RewardManagerModuleConfig(ConfigNode):
    """``reward.reward_manager.module``."""

    path: str | None = setting(None, "file for importlib", path=True)
    name: str = setting("custom_reward_manager", "module name")


@dataclass(frozen=True)
class RewardManagerConfig(ConfigNode):
    """``reward.reward_manager``."""

    source: str = setting("register", "register or importlib", choices=("register", "importlib"))
    name: str = setting("naive", "naive, dapo, gdpo, rate_limited, remote")
    module: RewardManagerModuleConfig = section(RewardManagerModuleConfig)


@dataclass(frozen=True)
class RewardRolloutDisaggregationConfig(ConfigNode):
    """``reward.reward_model.rollout.disaggregation``."""

    enabled: bool = setting(
        False, "disaggregation enabled of the reward model's engine", planned="served reward models"
    )
    prefill_replicas: int = setting(
        1, "disaggregation prefill replicas of the reward model's engine", planned="served reward models"
    )
    decode_replicas: int = setting(
        1, "disaggregation decode replicas of the reward model's engine", planned="served reward models"
    )
    decode_tensor_model_parallel_size: int | None = setting(
        None,
        "disaggregation decode tensor model parallel size of the reward model's engine",
        planned="served reward models",
    )
    transfer_backend: str = setting(
        "nixl", "disaggregation transfer backend of the reward model's engine", planned="served reward models"
    )
    bootstrap_port: int | None = setting(
        None, "disaggregation bootstrap port of the reward model's engine", planned="served reward models"
    )
    ib_device: str | None = setting(
        None, "disaggregation ib device of the reward model's engine", planned="served reward models"
    )


@dataclass(frozen=True)
class RewardRolloutConfig(ConfigNode):
    """``reward.reward_model.rollout``."""

    name: str = setting("hf", "name of the reward model's engine", upstream="???", planned="served reward models")
    dtype: str = setting(
        "auto", "dtype of the reward model's engine", upstream="bfloat16", planned="served reward models"
    )
    gpu_memory_utilization: float = setting(
        0.5,
        "gpu memory utilization of the reward model's engine",
        planned="served reward models",
        no_effect="the hf engine keeps its cache as large as it needs; vLLM and SGLang will use it",
    )
    enforce_eager: bool = setting(
        True,
        "enforce eager of the reward model's engine",
        planned="served reward models",
        no_effect="the hf engine keeps its cache as large as it needs; vLLM and SGLang will use it",
    )
    cudagraph_capture_sizes: list | None = setting(
        None,
        "cudagraph capture sizes of the reward model's engine",
        planned="served reward models",
        no_effect="the hf engine keeps its cache as large as it needs; vLLM and SGLang will use it",
    )
    free_cache_engine: bool = setting(
        True, "free cache engine of the reward model's engine", planned="served reward models"
    )
    data_parallel_size: int = setting(
        1, "data parallel size of the reward model's engine", planned="served reward models"
    )
    expert_parallel_size: int = setting(
        1, "expert parallel size of the reward model's engine", planned="served reward models"
    )
    tensor_model_parallel_size: int = setting(
        1, "tensor model parallel size of the reward model's engine", upstream=2, planned="served reward models"
    )
    pipeline_model_parallel_size: int = setting(
        1, "pipeline model parallel size of the reward model's engine", planned="served reward models"
    )
    max_num_batched_tokens: int = setting(
        8192, "max num batched tokens of the reward model's engine", planned="served reward models"
    )
    max_model_len: int | None = setting(
        None, "max model len of the reward model's engine", planned="served reward models"
    )
    max_num_seqs: int = setting(1024, "max num seqs of the reward model's engine", planned="served reward models")
    load_format: str = setting(
        "auto",
        "load format of the reward model's engine",
        planned="served reward models",
        no_effect="the hf engine keeps its cache as large as it needs; vLLM and SGLang will use it",
    )
    layered_summon: bool = setting(
        False,
        "layered summon of the reward model's engine",
        planned="served reward models",
        no_effect="the hf engine keeps its cache as large as it needs; vLLM and SGLang will use it",
    )
    scheduling_policy: str = setting(
        "fcfs", "scheduling policy of the reward model's engine", planned="served reward models"
    )
    full_determinism: bool = setting(
        False, "full determinism of the reward model's engine", planned="served reward models"
    )
    seed: int = setting(42, "seed of the reward model's engine", planned="served reward models")
    multi_stage_wake_up: bool = setting(
        False,
        "multi stage wake up of the reward model's engine",
        planned="served reward models",
        no_effect="the hf engine keeps its cache as large as it needs; vLLM and SGLang will use it",
    )
    engine_kwargs: dict = setting({}, "engine kwargs of the reward model's engine", planned="served reward models")
    limit_images: int | None = setting(
        None, "limit images of the reward model's engine", planned="served reward models"
    )
    enable_chunked_prefill: bool = setting(
        True,
        "enable chunked prefill of the reward model's engine",
        planned="served reward models",
        no_effect="the hf engine keeps its cache as large as it needs; vLLM and SGLang will use it",
    )
    enable_prefix_caching: bool = setting(
        True,
        "enable prefix caching of the reward model's engine",
        planned="served reward models",
        no_effect="the hf engine keeps its cache as large as it needs; vLLM and SGLang will use it",
    )
    disable_log_stats: bool = setting(
        True,
        "disable log stats of the reward model's engine",
        planned="served reward models",
        no_effect="the hf engine keeps its cache as large as it needs; vLLM and SGLang will use it",
    )
    skip_tokenizer_init: bool = setting(
        False,
        "skip tokenizer init of the reward model's engine",
        planned="served reward models",
        no_effect="the hf engine keeps its cache as large as it needs; vLLM and SGLang will use it",
    )
    ignore_eos: bool = setting(False, "ignore eos of the reward model's engine", planned="served reward models")
    temperature: float = setting(1.0, "temperature of the reward model's engine", planned="served reward models")
    top_k: int = setting(-1, "top k of the reward model's engine", planned="served reward models")
    top_p: float = setting(1.0, "top p of the reward model's engine", planned="served reward models")
    do_sample: bool = setting(True, "do sample of the reward model's engine", planned="served reward models")
    n: int = setting(1, "n of the reward model's engine", planned="served reward models")
    prompt_length: int = setting(2048, "prompt length of the reward model's engine", planned="served reward models")
    response_length: int = setting(2048, "response length of the reward model's engine", planned="served reward models")
    quantization: str | None = setting(
        None, "quantization of the reward model's engine", planned="served reward models"
    )
    quantization_config_file: str | None = setting(
        None, "quantization config file of the reward model's engine", planned="served reward models", path=True
    )
    mtp: dict | None = setting(None, "mtp of the reward model's engine", planned="served reward models")
    disaggregation: RewardRolloutDisaggregationConfig = section(RewardRolloutDisaggregationConfig)


@dataclass(frozen=True)
class RewardModelConfig(ConfigNode):
    """``reward.reward_model``."""

    enable: bool = setting(False, "serve a reward model", planned="served reward models")
    enable_resource_pool: bool = setting(False, "give it its own GPUs", planned="served reward models")
    n_gpus_per_node: int = setting(8, "pool size", planned="served reward models")
    nnodes: int = setting(0, "pool nodes", planned="served reward models")
    model_path: str | None = setting(None, "discriminative or generative RM", planned="served reward models", path=True)
    rollout: RewardRolloutConfig = section(RewardRolloutConfig)


@dataclass(frozen=True)
class SandboxFusionConfig(ConfigNode):
    """``reward.sandbox_fusion``."""

    url: str | None = setting(None, "code sandbox endpoint", planned="code rewards")
    max_concurrent: int = setting(64, "concurrency", planned="code rewards")
    memory_limit_mb: int = setting(1024, "memory per run", planned="code rewards")


@dataclass(frozen=True)
class RewardConfig(ConfigNode):
    """Scoring of responses."""

    num_workers: int = setting(1, "reward worker processes", upstream=8)
    custom_reward_function: CustomRewardFunctionConfig = section(CustomRewardFunctionConfig)
    reward_manager: RewardManagerConfig = section(RewardManagerConfig)
    reward_model: RewardModelConfig = section(RewardModelConfig)
    sandbox_fusion: SandboxFusionConfig = section(SandboxFusionConfig)
    reward_kwargs: dict = setting(
        {}, "settings of the reward manager: overlong_buffer_cfg.{enable,len,penalty_factor,log}, max_resp_len"
    )
    on_error: str = setting(
        "mask",
        "a sample that cannot be scored: mask it and count it, or raise",
        upstream=None,
        choices=("mask", "raise"),
    )
    timeout: float = setting(30.0, "seconds one sample may take to score", upstream=None)
