"""Settings of rewards."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from verl.config.schema.node import ABSENT, ConfigNode, section, setting
from verl.config.schema.role import LIKE_ACTOR, FSDPEngineConfig, MegatronEngineConfig
from verl.config.schema.tree import AMOUNT, COUNT, DTYPE, PORTION, POSITIVE

JUDGE_ENGINES = {"hf_server": "hf", "vllm": "vllm", "sglang": "sglang"}
"""Values of ``reward_model.rollout.name`` with which a run starts servers, and the sampler in each."""
_STARTED = ".name=hf_server, vllm or sglang"


@dataclass(frozen=True)
class CustomRewardFunctionConfig(ConfigNode):
    """A reward function of your own."""

    path: str | None = setting(None, "Python file with a reward function of your own", path=True)
    name: str | None = setting(
        None,
        "name of the function; null: compute_score or compute_reward, whichever the file has",
        upstream="compute_score",
    )
    reward_kwargs: dict = setting({}, "extra keyword arguments of every call")


@dataclass(frozen=True)
class RewardManagerModuleConfig(ConfigNode):
    """The file of a reward manager of your own."""

    path: str | None = setting(
        None,
        "Python file with a reward manager of your own, for source=importlib",
        path=True,
        needs="..source=importlib",
    )
    name: str = setting("custom_reward_manager", "class name, if the file has several")


@dataclass(frozen=True)
class RewardManagerConfig(ConfigNode):
    """Turns single scores into the rewards of a batch."""

    source: str = setting(
        "register",
        "register: a built-in or registered manager; importlib: one from a file",
        choices=("register", "importlib"),
    )
    name: str = setting(
        "naive",
        "name of the manager: naive, batch, dapo, gdpo, prime, rate_limited, remote (built in), or a dotted path",
    )
    module: RewardManagerModuleConfig = section(RewardManagerModuleConfig)


@dataclass(frozen=True)
class RewardServerConfig(ConfigNode):
    """The servers of a generative reward model."""

    url: str | None = setting(None, "address of a server that runs already", upstream=ABSENT, needs="..name=server")
    max_start_wait_time: float = setting(
        600.0,
        "seconds that a server which the run starts may take until it answers",
        upstream=ABSENT,
        within=POSITIVE,
        needs=f".{_STARTED}",
    )
    max_restarts: int = setting(
        3,
        "restarts of a server in a row, without an answer in between, after which the run ends",
        upstream=ABSENT,
        within=AMOUNT,
        needs=f".{_STARTED}",
    )


_of_servers = partial(setting, needs=_STARTED)


@dataclass(frozen=True)
class RewardRolloutConfig(ConfigNode):
    """The engine of the reward model."""

    name: str = setting(
        "hf",
        "hf: a scalar head on the engines that train; vllm, sglang, hf_server: a language model on servers that the run "
        "starts, which a reward function queries; server: one at rollout.server.url",
        upstream="???",
    )
    tensor_model_parallel_size: int = _of_servers(1, "GPUs of a server (vllm, sglang)", upstream=2, within=COUNT)
    data_parallel_size: int = _of_servers(
        1, "number of servers; with enable_resource_pool as many as the pool holds", within=COUNT
    )
    dtype: str = _of_servers(
        "auto",
        "dtype of the engine; auto: float32 on CPU, bfloat16 on an accelerator",
        upstream="bfloat16",
        within=DTYPE,
    )
    gpu_memory_utilization: float = _of_servers(
        0.5, "share of GPU memory for the engine (vllm, sglang)", within=PORTION
    )
    enforce_eager: bool = _of_servers(True, "run without CUDA graphs")
    max_model_len: int | None = _of_servers(
        None, "maximum length of prompt and answer in tokens; null: the model's limit", within=COUNT
    )
    max_num_batched_tokens: int = _of_servers(8192, "maximum tokens that the engine computes in one step", within=COUNT)
    max_num_seqs: int = _of_servers(1024, "maximum answers sampled at once, per server", within=COUNT)
    seed: int = _of_servers(42, "seed of requests that name none")
    engine_kwargs: dict = _of_servers({}, "arguments passed to the engine unchanged: {vllm: {...}} or {sglang: {...}}")
    server: RewardServerConfig = section(RewardServerConfig)


@dataclass(frozen=True)
class RewardModelConfig(ConfigNode):
    """A reward model that scores samples."""

    enable: bool = setting(False, "score samples with a reward model")
    enable_resource_pool: bool = setting(
        False, "run it on separate processes or GPUs, reward_model.nnodes x n_gpus_per_node"
    )
    n_gpus_per_node: int = setting(8, "processes per node of that pool, one per GPU; GPUs of servers")
    nnodes: int = setting(0, "nodes of that pool")
    model_path: str | None = setting(
        None,
        "folder or hub name of the reward model: a token or sequence classification checkpoint with one label, or a "
        "language model that judges",
        path=True,
    )
    input_tokenizer: str | None = setting(
        None,
        "tokenizer of the samples; null: the policy's. If the reward model has another one, each "
        "conversation is re-rendered with its chat template",
        upstream=ABSENT,
        path=True,
    )
    trust_remote_code: bool = setting(
        False, "run Python code that comes with the reward model or its tokenizer", upstream=ABSENT
    )
    external_lib: str | None = setting(
        None, "comma-separated modules to import before loading the reward model", upstream=ABSENT
    )
    override_config: dict = setting({}, "entries of the reward model's config.json to override", upstream=ABSENT)
    use_shm: bool = setting(False, "copy the reward model to shared memory before loading", upstream=ABSENT)
    use_remove_padding: bool = setting(True, "pack rows without padding", upstream=ABSENT)
    strategy: str = setting("auto", "backend: auto, plain, fsdp, fsdp2 or megatron", upstream=ABSENT)
    micro_batch_size: int | None = setting(
        None, "deprecated; use micro_batch_size_per_gpu", upstream=ABSENT, within=COUNT
    )
    micro_batch_size_per_gpu: int | None = setting(
        None,
        "samples per pass of one process; null: an automatic token budget",
        upstream=ABSENT,
        within=COUNT,
    )
    use_dynamic_bsz: bool = setting(
        False,
        "build micro-batches by token count",
        follows="actor_rollout_ref.actor.use_dynamic_bsz",
        upstream=ABSENT,
    )
    forward_max_token_len_per_gpu: int = setting(
        32768,
        "tokens per micro-batch of one process with use_dynamic_bsz; at least the longest sample",
        upstream=ABSENT,
        within=COUNT,
    )
    max_length: int | None = setting(
        None,
        "maximum conversation length in the reward model's tokens; longer ones lose their beginning, "
        "and are counted. null: no limit",
        upstream=ABSENT,
        within=COUNT,
    )
    fsdp_config: FSDPEngineConfig = section(FSDPEngineConfig)
    megatron: MegatronEngineConfig = section(MegatronEngineConfig, LIKE_ACTOR)
    rollout: RewardRolloutConfig = section(RewardRolloutConfig)


@dataclass(frozen=True)
class SandboxFusionConfig(ConfigNode):
    """Where generated programs run."""

    url: str | None = setting(
        None, "address of a service that runs programs to score them; null: the sandbox of this machine"
    )
    max_concurrent: int = setting(64, "maximum number of programs that run at the service at once", within=COUNT)
    memory_limit_mb: int = setting(
        1024, "memory limit of a program in MB, at the service and in the local sandbox", within=COUNT
    )
    allow_missing: list = setting(
        [],
        "isolation layers that the local sandbox may lack: namespaces, landlock, seccomp; empty: none",
        upstream=ABSENT,
    )


@dataclass(frozen=True)
class RewardConfig(ConfigNode):
    """How responses are scored."""

    num_workers: int = setting(1, "samples scored at once", upstream=8, within=COUNT)
    custom_reward_function: CustomRewardFunctionConfig = section(CustomRewardFunctionConfig, needs=".path")
    reward_manager: RewardManagerConfig = section(RewardManagerConfig)
    reward_model: RewardModelConfig = section(RewardModelConfig)
    sandbox_fusion: SandboxFusionConfig = section(SandboxFusionConfig)
    reward_kwargs: dict = setting(
        {},
        "settings of the reward manager; dapo: overlong_buffer_cfg.{enable, len, penalty_factor, log} and max_resp_len, both in tokens",
    )
    on_error: str = setting(
        "mask",
        "what to do with a sample on which your reward function fails: mask it out, score it zero, or"
        " raise and stop the run; mask and zero count it",
        upstream=ABSENT,
        choices=("mask", "raise", "zero"),
    )
    ground_truth: str = setting(
        "needed",
        "needed: refuse rows without reward_model.ground_truth if the reward function takes it (an "
        "empty text counts as one); none: the dataset has none, pass None",
        upstream=ABSENT,
        choices=("needed", "none"),
    )
    timeout: float = setting(30.0, "time limit per sample, in seconds", upstream=ABSENT, within=POSITIVE)
    while_sampling: bool = setting(
        False,
        "score each sample as soon as it is sampled, while others are still sampled; same numbers",
        upstream=ABSENT,
    )
    max_concurrent: int | None = setting(
        None,
        "maximum calls of the reward function at once; null: no limit, or 1 with reward_manager.name=rate_limited",
        upstream=ABSENT,
        within=COUNT,
    )
    max_rpm: float | None = setting(
        None,
        "maximum calls of the reward function per minute, evenly spaced; null: no limit",
        upstream=ABSENT,
        within=POSITIVE,
    )
    max_tpm: float | None = setting(
        None,
        "maximum tokens per minute of these calls, estimated_tokens_per_request each; null: no limit",
        upstream=ABSENT,
        within=POSITIVE,
    )
    estimated_tokens_per_request: int = setting(
        2000, "tokens that a call of the reward function uses", upstream=ABSENT, within=COUNT, needs=".max_tpm"
    )
