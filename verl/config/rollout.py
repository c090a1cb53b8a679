"""Settings of the rollout."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.node import ABSENT, ConfigNode, section, setting
from verl.config.profiler import ProfilerConfig


@dataclass(frozen=True)
class EngineKwargsConfig(ConfigNode):
    """Arguments that go to the sampling engine as they are."""

    vllm: dict = setting({}, "arguments of vLLM, as they are", planned="arguments of vLLM", engines=("vllm",))
    sglang: dict = setting({}, "arguments of SGLang, as they are", planned="arguments of SGLang", engines=("sglang",))


@dataclass(frozen=True)
class SamplingConfig(ConfigNode):
    """How responses are sampled in validation."""

    top_k: int = setting(-1, "keep that many most probable tokens; -1: all")
    top_p: float = setting(1.0, "keep the most probable tokens up to this probability; 1: all")
    temperature: float = setting(0.0, "temperature of validation samples")
    n: int = setting(1, "responses per validation prompt")
    do_sample: bool = setting(False, "sample; false: greedy")


@dataclass(frozen=True)
class MultiTurnConfig(ConfigNode):
    """Conversations with tools and users during sampling."""

    enable: bool = setting(False, "rows without a column agent_name run tool_agent instead of single_turn_agent")
    max_assistant_turns: int | None = setting(None, "most turns of the model; null: no limit")
    tool_config_path: str | None = setting(None, "YAML file of tools", path=True)
    function_tool_path: str | None = setting(None, "Python file of function tools", path=True)
    max_user_turns: int | None = setting(None, "most turns of tools and users; null: no limit")
    max_parallel_calls: int = setting(1, "tool calls that run per turn")
    max_tool_response_length: int = setting(256, "characters that are kept of a tool's answer")
    tool_response_truncate_side: str = setting(
        "middle",
        "what is kept of a long answer: its beginning (left), its end (right), or both (middle)",
        choices=("left", "middle", "right"),
    )
    tool_timeout: float | None = setting(
        60.0, "seconds until a call of a tool or of a simulated user is given up; null: never", upstream=ABSENT
    )
    trajectory_timeout: float | None = setting(
        None, "seconds until a conversation ends, and is scored as it stands; null: never", upstream=ABSENT
    )
    tokenization_sanity_check_mode: str = setting(
        "strict",
        "report conversations whose recorded tokens are not those of the conversation rendered anew: strict, "
        "ignore_strippable (not where only white space differs) or disable",
        choices=("strict", "ignore_strippable", "disable"),
    )
    format: str = setting(
        "hermes",
        "how the model writes tool calls: hermes, gpt-oss, qwen3_coder, llama3_json, glm, seed, minimax, kimi, "
        "deepseek_v3, deepseek_v4, gemma4, or a dotted path of a parser of your own",
    )
    num_repeat_rollouts: int | None = setting(
        None,
        "further samples per conversation",
        no_effect="actor_rollout_ref.rollout.n says how many samples there are",
    )
    interaction_config_path: str | None = setting(None, "YAML file of simulated users", path=True)


@dataclass(frozen=True)
class AgentLoopConfig(ConfigNode):
    """What runs for each prompt: one turn, or a loop of turns and tools."""

    num_workers: int = setting(
        1,
        "processes that run agent loops",
        upstream=8,
        no_effect="the first rollout worker runs all agent loops",
    )
    default_agent_loop: str = setting(
        "single_turn_agent", "loop of rows without a column agent_name: a registered name, or a dotted path"
    )
    agent_loop_config_path: str | None = setting(None, "YAML file that lists loops by name and class", path=True)


@dataclass(frozen=True)
class CheckpointEngineConfig(ConfigNode):
    """How weights go from the trainer to the sampler."""

    backend: str = setting(
        "naive",
        "how weights go to the sampler: naive (it lives in the trainer's process); with shared_memory, gloo, nccl, "
        "cuda_ipc, disk or delta it has a process of its own",
    )
    update_weights_bucket_megabytes: int = setting(2048, "MB per bucket of a weight sync")
    engine_kwargs: dict = setting({}, "arguments of that transport")
    custom_backend_module: str | None = setting(None, "module or Python file to import, which registers a transport")


_SERVERS = ("server", "sglang")


@dataclass(frozen=True)
class ServerConfig(ConfigNode):
    """Requests to sampling servers."""

    url: str | list | None = setting(
        None,
        "address of the server, http://host:port; several are replicas",
        upstream=ABSENT,
        planned="requests to servers",
        engines=_SERVERS,
    )
    api: str = setting(
        "auto",
        "kind of the server: auto (ask it), vllm, sglang, tgi, verl, or openai for any other",
        upstream=ABSENT,
        planned="requests to servers",
        engines=("server",),
        choices=("auto", "vllm", "sglang", "tgi", "verl", "openai"),
    )
    model: str | None = setting(
        None,
        "name under which the server serves the model; null: ask it",
        upstream=ABSENT,
        planned="requests to servers",
        engines=_SERVERS,
    )
    api_key_env: str | None = setting(
        None,
        "environment variable that holds the server's key",
        upstream=ABSENT,
        planned="requests to servers",
        engines=_SERVERS,
    )
    weights_dir: str | None = setting(
        None,
        "folder, seen by the server too, through which new weights go; null: a temporary one",
        upstream=ABSENT,
        planned="requests to servers",
        engines=_SERVERS,
        path=True,
    )
    timeout: float = setting(
        60.0,
        "seconds until an attempt of a request is given up",
        planned="requests to servers",
        engines=_SERVERS,
    )
    max_attempts: int = setting(3, "attempts per request", planned="requests to servers", engines=_SERVERS)
    retry_delay: float = setting(
        2.0,
        "seconds of the first pause between attempts; each further one is twice as long",
        planned="requests to servers",
        engines=_SERVERS,
    )
    max_connections: int = setting(1000, "open connections", planned="requests to servers", engines=_SERVERS)
    max_start_wait_time: float = setting(
        300.0, "seconds to wait for a server to start", planned="requests to servers", engines=_SERVERS
    )


@dataclass(frozen=True)
class RolloutConfig(ConfigNode):
    """Sampling of responses."""

    name: str = setting("hf", "sampling engine: hf (built in), vllm, sglang, server, trtllm", upstream="???")
    mode: str = setting(
        "async",
        "how the engine is driven",
        no_effect="every rollout goes through agent loops over an asynchronous sampler",
    )
    nnodes: int = setting(0, "machines of the samplers' own pool, with hybrid_engine=false; 0: they have none")
    n_gpus_per_node: int | None = setting(
        None,
        "processes per machine of that pool, one per GPU; null: 1",
        upstream=8,
        follows="trainer.n_gpus_per_node",
    )
    temperature: float = setting(1.0, "temperature of samples; log-probs are those at this temperature everywhere")
    top_k: int = setting(-1, "keep that many most probable tokens; -1: all")
    top_p: float = setting(1.0, "keep the most probable tokens up to this probability; 1: all")
    full_determinism: bool = setting(False, "the same bits whatever else is in the batch; slower")
    seed: int = setting(42, "seed of sampling")
    prompt_length: int = setting(
        512,
        "a mirror of data.max_prompt_length",
        follows="data.max_prompt_length",
        no_effect="prompts are measured and cut by data.max_prompt_length",
    )
    response_length: int = setting(512, "a mirror of data.max_response_length", follows="data.max_response_length")
    dtype: str = setting(
        "auto", "dtype of the engine; auto: float32 on CPU, bfloat16 on an accelerator", upstream="bfloat16"
    )
    gpu_memory_utilization: float = setting(
        0.5,
        "share of GPU memory for the engine",
        no_effect="the hf engine's cache takes the memory that its requests need",
        engines=("vllm", "sglang"),
    )
    ignore_eos: bool = setting(False, "go on after the end token until the length is reached")
    enforce_eager: bool = setting(False, "run without CUDA graphs")
    cudagraph_capture_sizes: list | None = setting(
        None,
        "batch sizes that get a CUDA graph",
        no_effect="the hf engine chooses the sizes itself",
        engines=("vllm",),
    )
    free_cache_engine: bool | None = setting(
        None,
        "give the KV cache back while the policy trains; null: on an accelerator yes, on CPU no",
        upstream=True,
    )
    tensor_model_parallel_size: int = setting(
        1,
        "devices of one replica, each with its part of the model; hf takes 1",
        upstream=2,
        planned="sampling on several ranks",
        engines=("hf", "vllm", "sglang"),
    )
    expert_parallel_size: int = setting(
        1, "expert-parallel size", planned="sampling on several ranks", engines=("vllm", "sglang")
    )
    pipeline_model_parallel_size: int = setting(
        1, "pipeline-parallel size", planned="sampling on several ranks", engines=("vllm", "sglang")
    )
    max_num_batched_tokens: int = setting(8192, "most tokens that the engine computes in one step")
    max_model_len: int | None = setting(None, "longest prompt with response in tokens; null: what the model allows")
    max_num_seqs: int = setting(256, "most responses that are sampled at once")
    enable_chunked_prefill: bool = setting(
        True,
        "compute long prompts in pieces",
        no_effect="the hf engine fills its steps up to max_num_batched_tokens by itself",
        engines=("vllm",),
    )
    enable_prefix_caching: bool = setting(True, "compute a prompt that several samples share once")
    scheduling_policy: str = setting(
        "fcfs",
        "order of waiting requests: fcfs or priority",
        planned="priority scheduling",
        engines=("vllm",),
        choices=("fcfs", "priority"),
    )
    load_format: str = setting(
        "dummy",
        "where the engine's first weights come from: dummy (the trainer), hf, safetensors, auto",
        no_effect="the hf engine gets the policy's weights before it samples",
        engines=("vllm",),
    )
    layered_summon: bool = setting(
        False,
        "gather weights layer by layer for weight sync",
        no_effect="weights are sent bucket by bucket in any case",
    )
    log_prob_micro_batch_size: int | None = setting(None, "older form of log_prob_micro_batch_size_per_gpu")
    log_prob_micro_batch_size_per_gpu: int | None = setting(
        None, "samples per pass of one process where old log-probs are computed; null: an automatic token budget"
    )
    log_prob_use_dynamic_bsz: bool = setting(
        False, "cut these micro-batches by tokens", follows="actor_rollout_ref.actor.use_dynamic_bsz"
    )
    log_prob_max_token_len_per_gpu: int = setting(
        16384,
        "tokens per micro-batch of one process with log_prob_use_dynamic_bsz",
        follows="actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
    )
    disable_log_stats: bool = setting(
        True,
        "mute the engine's own statistics",
        no_effect="the hf engine prints no statistics",
        engines=("vllm",),
    )
    do_sample: bool = setting(True, "sample; false: greedy")
    n: int = setting(1, "responses per prompt; group estimators need 2 or more")
    over_sample_rate: float = setting(
        0.0, "share of training samples that may be given up once the others are done; they are masked"
    )
    multi_stage_wake_up: bool = setting(
        False,
        "SGLang: wake weights and cache one after the other",
        no_effect="the hf engine wakes up at once",
    )
    engine_kwargs: EngineKwargsConfig = section(EngineKwargsConfig)
    val_kwargs: SamplingConfig = section(SamplingConfig)
    multi_turn: MultiTurnConfig = section(MultiTurnConfig)
    calculate_log_probs: bool = setting(True, "keep the log-probs of sampled tokens (rollout_log_probs)")
    agent: AgentLoopConfig = section(AgentLoopConfig)
    checkpoint_engine: CheckpointEngineConfig = section(CheckpointEngineConfig)
    skip_tokenizer_init: bool = setting(
        True,
        "the engine gets and gives token ids only",
        no_effect="the hf engine takes and gives token ids only",
    )
    quantization: str | None = setting(
        None,
        "fp8 or torchao",
        planned="quantized rollout",
        engines=("vllm", "sglang"),
        choices=("fp8", "torchao"),
    )
    standalone_gpu_memory_utilization: float | None = setting(
        None,
        "share of GPU memory of replicas in a pool of their own; null: gpu_memory_utilization",
        no_effect="the hf engine's cache takes the memory that its requests need",
        engines=("vllm",),
    )
    enable_sleep_mode: bool = setting(
        True,
        "let the engine give its memory back",
        no_effect="free_cache_engine decides whether memory is given back",
        engines=("vllm",),
    )
    sglang_engine_mode: str = setting(
        "local",
        "SGLang: local or server",
        no_effect="SGLang runs as a server in any case: one that server.url names, or one that is started",
    )
    server: ServerConfig = section(ServerConfig)
    profiler: ProfilerConfig = section(ProfilerConfig)
