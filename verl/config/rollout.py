"""Settings of the rollout."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.node import ConfigNode, section, setting
from verl.config.profiler import ProfilerConfig


@dataclass(frozen=True)
class EngineKwargsConfig(ConfigNode):
    """``actor_rollout_ref.rollout.engine_kwargs``."""

    vllm: dict = setting({}, "raw engine args", planned="the engine it belongs to")
    sglang: dict = setting({}, "raw engine args", planned="the engine it belongs to")
    trtllm: dict = setting({}, "raw engine args", planned="the engine it belongs to")


@dataclass(frozen=True)
class SamplingConfig(ConfigNode):
    """``actor_rollout_ref.rollout.val_kwargs``."""

    top_k: int = setting(-1, "validation top-k")
    top_p: float = setting(1.0, "validation top-p")
    temperature: float = setting(0.0, "validation temperature (0 = greedy)")
    n: int = setting(1, "validation repeats")
    do_sample: bool = setting(False, "sample in validation")


@dataclass(frozen=True)
class MultiTurnConfig(ConfigNode):
    """``actor_rollout_ref.rollout.multi_turn``."""

    enable: bool = setting(False, "multi-turn / tool rollouts", planned="multi-turn rollouts and tools")
    max_assistant_turns: int | None = setting(None, "cap on model turns", planned="multi-turn rollouts and tools")
    tool_config_path: str | None = setting(
        None, "YAML of stateful tools", planned="multi-turn rollouts and tools", path=True
    )
    function_tool_path: str | None = setting(
        None, "python file with @function_tool functions", planned="multi-turn rollouts and tools", path=True
    )
    max_user_turns: int | None = setting(None, "cap on tool/user turns", planned="multi-turn rollouts and tools")
    max_parallel_calls: int = setting(1, "tool calls run per turn", planned="multi-turn rollouts and tools")
    max_tool_response_length: int = setting(
        256, "characters kept of a tool answer", planned="multi-turn rollouts and tools"
    )
    tool_response_truncate_side: str = setting("middle", "left, middle, right", planned="multi-turn rollouts and tools")
    use_inference_chat_template: bool = setting(
        False, "production template instead of recorded tokens", planned="multi-turn rollouts and tools"
    )
    tokenization_sanity_check_mode: str = setting(
        "strict", "strict, ignore_strippable, disable", planned="multi-turn rollouts and tools"
    )
    format: str = setting(
        "hermes",
        "tool parser: hermes, gpt-oss, qwen3_coder, glm, seed, minimax, kimi, deepseek_v4, gemma4",
        planned="multi-turn rollouts and tools",
    )
    num_repeat_rollouts: int | None = setting(None, "extra repeats per sample", planned="multi-turn rollouts and tools")
    interaction_config_path: str | None = setting(
        None, "YAML of interactions", planned="multi-turn rollouts and tools", path=True
    )


@dataclass(frozen=True)
class CustomAsyncServerConfig(ConfigNode):
    """``actor_rollout_ref.rollout.agent.custom_async_server``."""

    path: str | None = setting(None, "custom server file", planned="agent loops from a file", path=True)
    name: str | None = setting(None, "class in it", planned="agent loops from a file")


@dataclass(frozen=True)
class AgentLoopConfig(ConfigNode):
    """``actor_rollout_ref.rollout.agent``."""

    num_workers: int = setting(
        1,
        "agent-loop worker processes",
        upstream=8,
        no_effect="the local runtime runs all agent loops in one process; Ray will use it",
    )
    default_agent_loop: str = setting("single_turn_agent", "single_turn_agent or tool_agent or custom name")
    agent_loop_config_path: str | None = setting(
        None, "YAML list of {name, _target_, ...}", planned="agent loops from a file", path=True
    )
    custom_async_server: CustomAsyncServerConfig = section(CustomAsyncServerConfig)
    agent_loop_manager_class: str | None = setting(
        None, "class that replaces the agent-loop manager", planned="the server rollout engines"
    )


@dataclass(frozen=True)
class CheckpointEngineConfig(ConfigNode):
    """``actor_rollout_ref.rollout.checkpoint_engine``."""

    backend: str = setting(
        "naive",
        "weight-sync transport: naive, nccl, nixl, hccl, kimi_ckpt_engine, mooncake, delta_sharded",
        planned="weight-sync transports between processes",
    )
    update_weights_bucket_megabytes: int = setting(2048, "bucket size for weight sync")
    engine_kwargs: dict = setting({}, "transport args", planned="weight-sync transports between processes")
    custom_backend_module: str | None = setting(
        None, "module imported to register a transport", planned="weight-sync transports between processes"
    )


@dataclass(frozen=True)
class TraceConfig(ConfigNode):
    """``actor_rollout_ref.rollout.trace``."""

    project_name: str | None = setting(None, "trace project", follows="trainer.project_name", planned="rollout traces")
    experiment_name: str | None = setting(
        None, "trace run", follows="trainer.experiment_name", planned="rollout traces"
    )
    backend: str | None = setting(None, "mlflow, weave, trackio", planned="rollout traces")
    token2text: bool = setting(False, "decode tokens in traces", planned="rollout traces")
    max_samples_per_step_per_worker: int | None = setting(None, "trace sampling cap", planned="rollout traces")


@dataclass(frozen=True)
class PrometheusConfig(ConfigNode):
    """``actor_rollout_ref.rollout.prometheus``."""

    enable: bool = setting(False, "engine metrics endpoint", planned="the Prometheus endpoint")
    port: int = setting(9090, "port", planned="the Prometheus endpoint")
    served_model_name: str | None = setting(
        None, "label", follows="actor_rollout_ref.model.path", planned="the Prometheus endpoint", path=True
    )
    file: str | None = setting(None, "configuration file of the endpoint", planned="the Prometheus endpoint", path=True)


@dataclass(frozen=True)
class DisaggregationConfig(ConfigNode):
    """``actor_rollout_ref.rollout.disaggregation``."""

    enabled: bool = setting(False, "prefill/decode split", planned="prefill/decode disaggregation")
    prefill_replicas: int = setting(1, "prefill count", planned="prefill/decode disaggregation")
    decode_replicas: int = setting(1, "decode count", planned="prefill/decode disaggregation")
    decode_tensor_model_parallel_size: int | None = setting(None, "decode TP", planned="prefill/decode disaggregation")
    transfer_backend: str = setting(
        "nixl", "nixl, mooncake, ascend, mori, fake", planned="prefill/decode disaggregation"
    )
    bootstrap_port: int | None = setting(None, "port", planned="prefill/decode disaggregation")
    ib_device: str | None = setting(None, "IB device", planned="prefill/decode disaggregation")


@dataclass(frozen=True)
class ServerConfig(ConfigNode):
    """``actor_rollout_ref.rollout.server``."""

    timeout: int = setting(60, "seconds per request", planned="the server rollout engines")
    max_attempts: int = setting(3, "tries per request", planned="the server rollout engines")
    retry_delay: int = setting(2, "seconds between tries", planned="the server rollout engines")
    max_connections: int = setting(1000, "open connections", planned="the server rollout engines")
    max_start_wait_time: int = setting(300, "seconds to wait for a server", planned="the server rollout engines")


@dataclass(frozen=True)
class RolloutConfig(ConfigNode):
    """Sampling responses."""

    name: str = setting("hf", "vllm, sglang, trtllm (hf named in comments only)", upstream="???")
    mode: str = setting(
        "async",
        "async (server) only since 0.7",
        no_effect="every rollout goes through agent loops over an asynchronous sampler",
    )
    nnodes: int = setting(
        0, "nodes for a stand-alone rollout pool; 0 = colocated", planned="a pool of its own for the rollout"
    )
    n_gpus_per_node: int | None = setting(
        None,
        "GPUs per node of that pool",
        follows="trainer.n_gpus_per_node",
        upstream=8,
        planned="a pool of its own for the rollout",
    )
    temperature: float = setting(1.0, "sampling temperature (also used when scoring log-probs)")
    top_k: int = setting(-1, "-1 = off for vLLM")
    top_p: float = setting(1.0, "nucleus mass")
    full_determinism: bool = setting(
        False, "batch-invariant reproducible rollout", planned="bitwise batch-invariant sampling"
    )
    seed: int = setting(42, "sampling seed")
    prompt_length: int = setting(
        512,
        "longest prompt in tokens; follows data.max_prompt_length",
        follows="data.max_prompt_length",
        no_effect="prompts are measured and cut by data.max_prompt_length",
    )
    response_length: int = setting(512, "follows data.max_response_length", follows="data.max_response_length")
    dtype: str = setting("auto", "engine dtype", upstream="bfloat16")
    gpu_memory_utilization: float = setting(
        0.5,
        "GPU share for the engine/KV cache",
        no_effect="the hf engine keeps its cache as large as it needs; vLLM and SGLang will use it",
    )
    ignore_eos: bool = setting(False, "keep generating after EOS")
    enforce_eager: bool = setting(
        False,
        "no CUDA graph",
        no_effect="the hf engine keeps its cache as large as it needs; vLLM and SGLang will use it",
    )
    cudagraph_capture_sizes: list | None = setting(
        None,
        "vLLM graph sizes",
        no_effect="the hf engine keeps its cache as large as it needs; vLLM and SGLang will use it",
    )
    free_cache_engine: bool | None = setting(
        None, "give the key/value cache back between rollouts; null: on an accelerator yes, on CPU no", upstream=True
    )
    tensor_model_parallel_size: int = setting(1, "rollout TP", upstream=2, planned="sampling on several ranks")
    data_parallel_size: int = setting(1, "rollout DP", planned="sampling on several ranks")
    expert_parallel_size: int = setting(1, "rollout EP (must be TP x DP when > 1)", planned="sampling on several ranks")
    pipeline_model_parallel_size: int = setting(1, "rollout PP", planned="sampling on several ranks")
    max_num_batched_tokens: int = setting(8192, "scheduler token cap")
    max_model_len: int | None = setting(None, "engine context limit")
    max_num_seqs: int = setting(256, "concurrent sequences")
    enable_chunked_prefill: bool = setting(
        True,
        "chunked prefill",
        no_effect="the hf engine keeps its cache as large as it needs; vLLM and SGLang will use it",
    )
    enable_prefix_caching: bool = setting(
        True,
        "prefix KV reuse",
        no_effect="the hf engine keeps its cache as large as it needs; vLLM and SGLang will use it",
    )
    logprobs_mode: str = setting(
        "processed_logprobs", "which log-probs the engine reports", planned="raw log-probs of the sampler"
    )
    scheduling_policy: str = setting("fcfs", "fcfs or priority", planned="priority scheduling")
    load_format: str = setting(
        "dummy",
        "dummy (weights come from trainer), hf, safetensors, auto",
        no_effect="the hf engine keeps its cache as large as it needs; vLLM and SGLang will use it",
    )
    layered_summon: bool = setting(
        False,
        "gather LoRA/FSDP weights layer by layer",
        no_effect="the hf engine keeps its cache as large as it needs; vLLM and SGLang will use it",
    )
    log_prob_micro_batch_size: int | None = setting(None, "deprecated global value")
    log_prob_micro_batch_size_per_gpu: int | None = setting(
        None, "samples per GPU for old-log-prob pass; required without dynamic batching"
    )
    log_prob_use_dynamic_bsz: bool = setting(False, "follows actor", follows="actor_rollout_ref.actor.use_dynamic_bsz")
    log_prob_max_token_len_per_gpu: int = setting(
        16384, "follows actor", follows="actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
    )
    disable_log_stats: bool = setting(
        True,
        "mute engine stats",
        no_effect="the hf engine keeps its cache as large as it needs; vLLM and SGLang will use it",
    )
    do_sample: bool = setting(True, "false = greedy")
    n: int = setting(1, "responses per prompt; must be > 1 for group estimators")
    over_sample_rate: float = setting(
        0.0, "stop early once (1-rate) of requests finish", planned="over-sampling with early stop"
    )
    multi_stage_wake_up: bool = setting(
        False,
        "SGLang staged wake-up",
        no_effect="the hf engine keeps its cache as large as it needs; vLLM and SGLang will use it",
    )
    engine_kwargs: EngineKwargsConfig = section(EngineKwargsConfig)
    val_kwargs: SamplingConfig = section(SamplingConfig)
    router_config_path: str | None = setting(
        None, "external request router plugin YAML", planned="request routing", path=True
    )
    multi_turn: MultiTurnConfig = section(MultiTurnConfig)
    calculate_log_probs: bool = setting(True, "return rollout log-probs (default True since 0.7; False before)")
    agent: AgentLoopConfig = section(AgentLoopConfig)
    checkpoint_engine: CheckpointEngineConfig = section(CheckpointEngineConfig)
    trace: TraceConfig = section(TraceConfig)
    skip_tokenizer_init: bool = setting(
        True,
        "token-in token-out engine",
        no_effect="the hf engine keeps its cache as large as it needs; vLLM and SGLang will use it",
    )
    enable_rollout_routing_replay: bool = setting(False, "record MoE routes", planned="router replay")
    moe_load_balance_metrics_interval: int = setting(0, "log MoE balance every k steps", planned="router replay")
    prometheus: PrometheusConfig = section(PrometheusConfig)
    quantization: str | None = setting(None, "fp8 or torchao", planned="quantized rollout")
    quantization_config_file: str | None = setting(
        None, "extra quantization config", planned="quantized rollout", path=True
    )
    mtp: dict | None = setting(None, "instead of model.mtp in the sampler", planned="multi-token prediction")
    qat: dict | None = setting(
        None,
        "instead of the actor's qat in the sampler",
        planned="quantization-aware training",
    )
    disaggregation: DisaggregationConfig = section(DisaggregationConfig)
    repetition_penalty: float = setting(
        1.0, "divides the logits of tokens already there", planned="the repetition penalty"
    )
    standalone_gpu_memory_utilization: float | None = setting(
        None,
        "memory share of stand-alone replicas",
        no_effect="the hf engine keeps its cache as large as it needs; vLLM and SGLang will use it",
    )
    limit_images: int | None = setting(None, "images per prompt", planned="vision-language models")
    enable_sleep_mode: bool = setting(
        True,
        "engine sleep mode",
        no_effect="the hf engine keeps its cache as large as it needs; vLLM and SGLang will use it",
    )
    moe_tensor_parallel_size: int = setting(1, "tensor parallel size of experts", planned="sampling on several ranks")
    layer_name_map: str | None = setting(
        None, "names of layers for the SGLang server adapter", planned="the server rollout engines"
    )
    sglang_engine_mode: str = setting("local", "local or server", planned="the server rollout engines")
    server: ServerConfig = section(ServerConfig)
    custom: str | None = setting(None, "settings of a plug-in", planned="the server rollout engines")
    checkpoint_manager_class: str | None = setting(
        None, "class that replaces the weight-sync manager", planned="the server rollout engines"
    )
    enable_vision: bool = setting(False, "allow images in prompts", planned="vision-language models")
    profiler: ProfilerConfig = section(ProfilerConfig)
