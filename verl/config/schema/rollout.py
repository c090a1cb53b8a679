"""Settings of the rollout."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from verl.config.schema.node import ABSENT, ConfigNode, section, setting
from verl.config.schema.role import ProfilerConfig
from verl.config.schema.tree import AMOUNT, COUNT, DTYPE, PORTION, POSITIVE, SECONDS, TOP_K, ValueBound, at_most

MOST_SAMPLES = 1 << 16
"""Of a prompt: more than that is a typing error, which would fill the memory before anything is sampled."""
DRAWN = ValueBound(
    "above 0, since log-probs are those at this temperature (do_sample=false is greedy)", lambda value: value > 0
)


@dataclass(frozen=True)
class EngineKwargsConfig(ConfigNode):
    """Arguments passed to the sampling engine unchanged."""

    vllm: dict = setting(
        {}, "arguments passed to vLLM unchanged", no_effect="another engine than vLLM samples", engines=("vllm",)
    )
    sglang: dict = setting(
        {}, "arguments passed to SGLang unchanged", no_effect="another engine than SGLang samples", engines=("sglang",)
    )


@dataclass(frozen=True)
class SamplingConfig(ConfigNode):
    """Sampling in validation."""

    top_k: int = setting(-1, "sample from the k most probable tokens; -1: all", within=TOP_K, needs=".do_sample=true")
    top_p: float = setting(
        1.0,
        "nucleus sampling: cumulative probability to sample from; 1: all tokens",
        within=PORTION,
        needs=".do_sample=true",
    )
    temperature: float = setting(0.0, "temperature of validation samples", within=AMOUNT, needs=".do_sample=true")
    n: int = setting(1, "responses per validation prompt", within=(COUNT, at_most(MOST_SAMPLES)))
    do_sample: bool = setting(False, "sample; false: greedy")


@dataclass(frozen=True)
class MultiTurnConfig(ConfigNode):
    """Conversations with tools and users during sampling."""

    enable: bool = setting(False, "run tool_agent, not single_turn_agent, for rows without agent_name")
    max_assistant_turns: int | None = setting(None, "maximum assistant turns; null: no limit", within=COUNT)
    tool_config_path: str | None = setting(None, "YAML file of tools", path=True)
    function_tool_path: str | None = setting(None, "Python file of function tools", path=True)
    max_user_turns: int | None = setting(None, "maximum tool and user turns; null: no limit", within=COUNT)
    max_parallel_calls: int = setting(1, "maximum tool calls per turn", within=COUNT)
    max_tool_response_length: int = setting(256, "maximum length of a tool response, in characters", within=COUNT)
    tool_response_truncate_side: str = setting(
        "middle",
        "part of an overlong response to keep: the beginning (left), the end (right), or both (middle)",
        choices=("left", "middle", "right"),
    )
    tool_timeout: float | None = setting(
        60.0,
        "time limit of a call to a tool or a simulated user, in seconds; null: none",
        upstream=ABSENT,
        within=SECONDS,
    )
    trajectory_timeout: float | None = setting(
        None,
        "time limit of a conversation, in seconds; it is then scored as it stands; null: none",
        upstream=ABSENT,
        within=SECONDS,
    )
    tokenization_sanity_check_mode: str = setting(
        "strict",
        "report conversations whose recorded tokens differ from a fresh rendering: strict, "
        "ignore_strippable (ignore white space) or disable",
        choices=("strict", "ignore_strippable", "disable"),
    )
    format: str = setting(
        "hermes",
        "tool-call format of the model: hermes, gpt-oss, qwen3_coder, llama3_json, glm, seed, minimax, kimi, "
        "deepseek_v3, deepseek_v4, gemma4, or the dotted path of your own parser",
    )
    num_repeat_rollouts: int | None = setting(
        None,
        "extra samples per conversation",
        no_effect="actor_rollout_ref.rollout.n sets the number of samples",
    )
    interaction_config_path: str | None = setting(None, "YAML file of simulated users", path=True)


@dataclass(frozen=True)
class AgentLoopConfig(ConfigNode):
    """The agent loop of each prompt: one turn, or turns with tools."""

    num_workers: int = setting(
        1,
        "processes that run agent loops; 1: the first process that samples; more, on Ray and without a device, pay where "
        "tools, templates or parsers keep a core busy",
        upstream=8,
        within=COUNT,
    )
    default_agent_loop: str = setting(
        "single_turn_agent", "agent loop of rows without agent_name: a registered name, or a dotted path"
    )
    agent_loop_config_path: str | None = setting(None, "YAML file that lists loops by name and class", path=True)


@dataclass(frozen=True)
class CheckpointEngineConfig(ConfigNode):
    """How weights go from the trainer to the sampler."""

    backend: str = setting(
        "naive",
        "weight sync transport: naive (the sampler lives in the trainer's process); shared_memory, "
        "gloo, nccl, cuda_ipc, disk and delta give it a process of its own",
    )
    update_weights_bucket_megabytes: int = setting(2048, "MB per bucket of a weight sync", within=COUNT)
    engine_kwargs: dict = setting({}, "arguments of the transport")
    custom_backend_module: str | None = setting(None, "module or Python file that registers a transport")


_of_server = partial(setting, planned="requests to servers", engines=("server",))
_of_servers = partial(setting, planned="requests to servers", engines=("server", "sglang"))


@dataclass(frozen=True)
class ServerConfig(ConfigNode):
    """Requests to sampling servers."""

    url: str | list | None = _of_servers(
        None, "server address, http://host:port; a list makes replicas", upstream=ABSENT
    )
    api: str = _of_server(
        "auto",
        "server API: auto (detect), vllm, sglang, tgi, verl, or openai for any other",
        upstream=ABSENT,
        choices=("auto", "vllm", "sglang", "tgi", "verl", "openai"),
    )
    model: str | None = _of_servers(None, "model name at the server; null: query the server", upstream=ABSENT)
    api_key_env: str | None = _of_servers(None, "environment variable that holds the server's key", upstream=ABSENT)
    weights_dir: str | None = _of_servers(
        None,
        "shared folder for new weights, which the server must see too; null: a temporary one",
        upstream=ABSENT,
        path=True,
    )
    timeout: float = _of_servers(60.0, "time limit per attempt, in seconds", within=POSITIVE)
    max_attempts: int = _of_servers(3, "attempts per request", within=COUNT)
    retry_delay: float = _of_servers(
        2.0, "first pause between attempts, in seconds; it doubles each time", within=AMOUNT
    )
    max_connections: int = _of_servers(1000, "maximum number of open connections", within=COUNT)
    max_start_wait_time: float = _of_servers(300.0, "seconds to wait for a server to start", within=AMOUNT)


@dataclass(frozen=True)
class RolloutTraceSection(ConfigNode):
    """Traces of conversations with their calls, in a tool that shows them."""

    backend: str | None = setting(
        None,
        "where traces go: mlflow, weave or trackio; null: none are recorded",
        choices=("mlflow", "weave", "trackio"),
    )
    token2text: bool = setting(False, "record the text of tokens along with their ids in traces")
    max_samples_per_step_per_worker: int | None = setting(
        None,
        "prompts per step, drawn for each process that runs agent loops, of which all samples are traced; null: all",
        within=COUNT,
    )
    project_name: str | None = setting(None, "project of the traces", follows="trainer.project_name")
    experiment_name: str | None = setting(None, "name of the run in them", follows="trainer.experiment_name")


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
    max_replacements: int = setting(
        0,
        "replicas of the samplers' pool that may be replaced in a run after they died or hung (trainer.hang_seconds); "
        "one more ends the run",
        upstream=ABSENT,
        within=AMOUNT,
    )
    enable_vision: bool = setting(
        False,
        "say that the policy takes images: an error where model or sampler do not; without it images are taken as well",
        upstream=ABSENT,
    )
    temperature: float = setting(
        1.0, "sampling temperature; all log-probs are computed at this temperature", within=DRAWN
    )
    top_k: int = setting(-1, "sample from the k most probable tokens; -1: all", within=TOP_K)
    top_p: float = setting(
        1.0, "nucleus sampling: cumulative probability to sample from; 1: all tokens", within=PORTION
    )
    repetition_penalty: float = setting(
        1.0,
        "of tokens that the prompt or the response already has, divide positive logits by this and multiply negative ones; "
        "1: none",
        within=POSITIVE,
    )
    logprobs_mode: str = setting(
        "processed_logprobs",
        "log-probs that the sampler reports: processed_logprobs (of what it draws from), or raw_logprobs (of the logits: "
        "temperature 1, no penalty, no token left out)",
        choices=("processed_logprobs", "raw_logprobs"),
    )
    full_determinism: bool = setting(
        False, "make each sample independent of the rest of the batch, bit for bit; slower"
    )
    seed: int = setting(42, "seed of sampling")
    prompt_length: int = setting(
        512,
        "copied from data.max_prompt_length",
        follows="data.max_prompt_length",
        no_effect="prompts are measured and cut by data.max_prompt_length",
    )
    response_length: int = setting(512, "copied from data.max_response_length", follows="data.max_response_length")
    dtype: str = setting(
        "auto",
        "dtype of the engine; auto: float32 on CPU, bfloat16 on an accelerator",
        upstream="bfloat16",
        within=DTYPE,
    )
    gpu_memory_utilization: float = setting(
        0.5,
        "share of GPU memory for the engine",
        no_effect="the hf engine's cache takes the memory that its requests need",
        engines=("vllm", "sglang"),
        within=PORTION,
    )
    ignore_eos: bool = setting(False, "keep sampling after the end token, up to the maximum length")
    enforce_eager: bool = setting(False, "run without CUDA graphs")
    cudagraph_capture_sizes: list | None = setting(
        None,
        "batch sizes that get a CUDA graph",
        no_effect="the hf engine chooses the sizes itself",
        engines=("vllm",),
    )
    free_cache_engine: bool | None = setting(
        None,
        "free the KV cache while the policy trains; null: on an accelerator, and on a CPU from 256 MB of weights on",
        upstream=True,
    )
    tensor_model_parallel_size: int = setting(
        1,
        "tensor-parallel size of a replica; hf takes 1",
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
    max_num_batched_tokens: int = setting(8192, "maximum tokens that the engine computes in one step", within=COUNT)
    max_model_len: int | None = setting(
        None,
        "maximum length of prompt and response in tokens; null: the model's limit",
        within=COUNT,
    )
    max_num_seqs: int = setting(256, "maximum responses sampled at once, per replica", within=COUNT)
    enable_chunked_prefill: bool = setting(
        True,
        "compute long prompts in chunks",
        no_effect="the hf engine fills its steps up to max_num_batched_tokens by itself",
        engines=("vllm",),
    )
    enable_prefix_caching: bool = setting(True, "compute a shared prompt once for its samples")
    scheduling_policy: str = setting(
        "fcfs",
        "order of waiting requests: fcfs or priority",
        planned="priority scheduling",
        engines=("vllm",),
        choices=("fcfs", "priority"),
    )
    load_format: str = setting(
        "dummy",
        "source of the engine's first weights: dummy (the trainer), hf, safetensors, auto",
        no_effect="the hf engine gets the policy's weights before it samples",
        engines=("vllm",),
    )
    layered_summon: bool = setting(
        False,
        "gather weights layer by layer for weight sync",
        no_effect="weights are sent bucket by bucket in any case",
    )
    log_prob_micro_batch_size: int | None = setting(
        None, "deprecated; use log_prob_micro_batch_size_per_gpu", within=COUNT
    )
    log_prob_micro_batch_size_per_gpu: int | None = setting(
        None,
        "samples per forward-only pass of one process (old log-probs); null: an automatic token budget",
        within=COUNT,
    )
    log_prob_use_dynamic_bsz: bool = setting(
        False, "build these micro-batches by token count", follows="actor_rollout_ref.actor.use_dynamic_bsz"
    )
    log_prob_max_token_len_per_gpu: int = setting(
        16384,
        "tokens per micro-batch of one process with log_prob_use_dynamic_bsz",
        follows="actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
        within=COUNT,
    )
    disable_log_stats: bool = setting(
        True,
        "turn off the engine's own statistics",
        no_effect="the hf engine prints no statistics",
        engines=("vllm",),
    )
    do_sample: bool = setting(True, "sample; false: greedy")
    n: int = setting(1, "responses per prompt; group estimators need 2 or more", within=(COUNT, at_most(MOST_SAMPLES)))
    over_sample_rate: float = setting(
        0.0,
        "share of training samples that may be aborted once the others are done; they are masked",
        within=ValueBound("0 or more, below 1", lambda share: 0 <= share < 1),
    )
    keep_unfinished: bool = setting(
        False,
        "partial rollouts: with over_sample_rate, sample more prompts than a step trains on, and continue unfinished "
        "responses in the next step; with a queue: requests_at_update=abort",
        upstream=ABSENT,
    )
    requests_at_update: str = setting(
        "wait",
        "requests in flight when weights arrive: wait: they end first; pause: they stop, and continue from their prefix "
        "with the new weights; abort: as pause, on any replica",
        upstream=ABSENT,
        choices=("wait", "pause", "abort"),
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
    enable_rollout_routing_replay: bool = setting(
        False,
        "record which experts of a mixture the sampler chose for each token (routed_experts), for actor.router_replay.mode=R3",
    )
    moe_load_balance_metrics_interval: int = setting(
        0, "report every so many steps how evenly the sampler of a mixture used its experts (rollout/moe/*); 0: never"
    )
    agent: AgentLoopConfig = section(AgentLoopConfig)
    trace: RolloutTraceSection = section(RolloutTraceSection, needs=".backend")
    checkpoint_engine: CheckpointEngineConfig = section(CheckpointEngineConfig)
    skip_tokenizer_init: bool = setting(
        True,
        "exchange token ids only",
        no_effect="the hf engine exchanges token ids only",
    )
    quantization: str | None = setting(
        None,
        "format of the sampler's linear layers, rounded at each weight sync: fp8, int8 (hf), or torchao (vllm); "
        "null: dtype",
        planned="quantized rollout",
        engines=("hf", "vllm", "sglang"),
        choices=("fp8", "int8", "torchao"),
    )
    quantization_config_file: str | None = setting(
        None,
        "JSON file with the configuration of torchao for quantization=torchao",
        planned="quantized rollout",
        engines=("vllm",),
        path=True,
    )
    quantization_tolerance: float = setting(
        0.2,
        "with quantization: largest mean difference, in nats, between log-probs of the sampler and of the trainer on a few "
        "tokens after each weight sync; a larger one ends the run",
        upstream=ABSENT,
    )
    standalone_gpu_memory_utilization: float | None = setting(
        None,
        "share of GPU memory of replicas in a separate pool; null: gpu_memory_utilization",
        no_effect="the hf engine's cache takes the memory that its requests need",
        engines=("vllm",),
    )
    enable_sleep_mode: bool = setting(
        True,
        "let the engine free its memory",
        no_effect="free_cache_engine decides",
        engines=("vllm",),
    )
    sglang_engine_mode: str = setting(
        "local",
        "SGLang: local or server",
        no_effect="SGLang runs as a server in any case: one that server.url names, or one that is started",
    )
    server: ServerConfig = section(ServerConfig)
    profiler: ProfilerConfig = section(ProfilerConfig)
