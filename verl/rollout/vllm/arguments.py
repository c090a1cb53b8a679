"""From the sections ``rollout`` and ``model`` of the configuration to vLLM's engine arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from verl.config.schema.model import HFModelConfig
from verl.config.schema.rollout import RolloutConfig
from verl.errors import ConfigError, NotBuiltError, RolloutError, suggest
from verl.metrics import notice
from verl.models import lora
from verl.models.lora import LoraSettings
from verl.rollout.adapters import separate_adapter
from verl.rollout.model_facts import ModelFacts
from verl.rollout.vllm.extension import PATH
from verl.rollout.vllm.versions import ADAPTER_RANKS, CPU_HEAD_DIMS

_R = "actor_rollout_ref.rollout"
LAUNCHER = "mp"
"""How an engine gets its workers: processes of its own. On Ray vLLM would request them from Ray, which has given their
devices to the trainers; with ``external_launcher`` every rank would need every request in one order."""
OURS = {
    **dict.fromkeys(("model", "worker_extension_cls", "skip_tokenizer_init"), "Leave it out."),
    "logprobs_mode": f"Set {_R}.logprobs_mode.",
}
"""Arguments on which the sampler depends; ``engine_kwargs`` may not change them."""
SIZES = {
    "tensor_parallel_size": f"{_R}.tensor_model_parallel_size",
    "pipeline_parallel_size": f"{_R}.pipeline_model_parallel_size",
    "enable_expert_parallel": f"{_R}.expert_parallel_size",
}
"""Nor these, which have their own keys."""


def from_config(rollout: RolloutConfig, model: HFModelConfig, device: str, facts: ModelFacts) -> dict[str, Any]:
    """Arguments of vLLM's ``EngineArgs``, ``engine_kwargs.vllm`` included."""
    auto = "float32" if device == "cpu" else "bfloat16"
    adapter = separate_adapter(rollout, model)
    arguments = {
        "model": str(model.path),
        "tokenizer": model.tokenizer_path or None,
        "trust_remote_code": bool(model.trust_remote_code),
        "hf_overrides": _overrides(rollout, model) or None,
        "dtype": auto if rollout.dtype == "auto" else rollout.dtype,
        "seed": int(rollout.seed),
        "load_format": _load_format(rollout.load_format, device, facts, adapter),
        "max_model_len": _context(rollout, facts),
        "max_num_seqs": rollout.max_num_seqs,
        "max_num_batched_tokens": _batched_tokens(rollout, facts),
        "enable_chunked_prefill": rollout.enable_chunked_prefill,
        "enable_prefix_caching": rollout.enable_prefix_caching,
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        "enforce_eager": True if device == "cpu" else rollout.enforce_eager,
        "cudagraph_capture_sizes": rollout.cudagraph_capture_sizes,
        "tensor_parallel_size": rollout.tensor_model_parallel_size,
        "pipeline_parallel_size": rollout.pipeline_model_parallel_size,
        "enable_expert_parallel": rollout.expert_parallel_size > 1,
        "quantization": rollout.quantization,
        "scheduling_policy": rollout.scheduling_policy,
        "disable_log_stats": rollout.disable_log_stats,
        "enable_sleep_mode": bool(rollout.enable_sleep_mode) and device != "cpu",
        "logprobs_mode": rollout.logprobs_mode,
        "skip_tokenizer_init": not facts.sees,  # its image processor, which is built and not used, needs a tokenizer
        "limit_mm_per_prompt": {"image": 1, "video": 1} if facts.sees else None,  # memory is measured with one of each
        "worker_extension_cls": PATH,
        **({} if adapter is None else of_adapter(adapter)),
    }
    passed = {k: v for k, v in merge_arguments(arguments, rollout.engine_kwargs.vllm or {}).items() if v is not None}
    return passed if num_workers(passed) == 1 else {"distributed_executor_backend": LAUNCHER, **passed}


def of_adapter(settings: LoraSettings) -> dict[str, Any]:
    """Room for one adapter: the smallest rank of vLLM's that holds it.

    Raises:
        RolloutError: its rank is larger than all of them.
    """
    config = lora.config_of(settings)
    rank = max([config.r, *(config.rank_pattern or {}).values()])
    fitting = [most for most in ADAPTER_RANKS if most >= rank]
    if not fitting:
        raise RolloutError(
            "vLLM has no room for an adapter of this rank",
            key="actor_rollout_ref.model.lora_rank",
            got=rank,
            allowed=f"at most {ADAPTER_RANKS[-1]}",
            fix="Set actor_rollout_ref.model.lora.merge=true: merged weights are sent then.",
        )
    return {"enable_lora": True, "max_lora_rank": fitting[0], "max_loras": 1, "max_cpu_loras": 1}


def merge_arguments(defaults: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Our arguments under the user's ``engine_kwargs.vllm``.

    Raises:
        ConfigError: one of them is the sampler's own.
    """
    for name in extra:
        if name in OURS or name in SIZES:
            raise ConfigError(
                "this argument of vLLM is set by the sampler itself",
                key=f"{_R}.engine_kwargs.vllm.{name}",
                got=extra[name],
                fix=f"Set {SIZES[name]}, from which its devices are counted." if name in SIZES else OURS[name],
            )
    return {**defaults, **extra}


def supported_arguments(arguments: Mapping[str, Any], engine_args: type, ours: Mapping[str, Any]) -> dict[str, Any]:
    """Those arguments that this version of vLLM has.

    Args:
        ours: arguments that come from `from_config`; one that this version lacks is left out with a notice.

    Raises:
        ConfigError: an argument of the user's that this version does not have.
    """
    names = {field.name for field in dataclasses.fields(engine_args)}
    accepted = {}
    for name, value in arguments.items():
        if name in names:
            accepted[name] = value
        elif name in ours:
            notice(f"{_R}.name", f"this version of vLLM has no argument {name!r}; it is left out")
        else:
            raise ConfigError(
                "vLLM has no such argument",
                key=f"{_R}.engine_kwargs.vllm.{name}",
                got=value,
                fix=suggest(name, names) or "Is it an argument of another version?",
            )
    return accepted


def num_workers(arguments: Mapping[str, Any]) -> int:
    """Processes of an engine with these arguments."""
    return int(arguments.get("tensor_parallel_size") or 1) * int(arguments.get("pipeline_parallel_size") or 1)


def check_layout(arguments: Mapping[str, Any], on_cpu: bool) -> None:
    """Refuse a layout of workers that the engine does not have, before it is started.

    Raises:
        ConfigError: workers that are not the engine's own processes.
        RolloutError: a pipeline on a CPU.
        NotBuiltError: several engines in one.
    """
    launcher = arguments.get("distributed_executor_backend", LAUNCHER)
    if num_workers(arguments) > 1 and launcher != LAUNCHER:
        raise ConfigError(
            "the workers of an engine are processes that it starts itself",
            key=f"{_R}.engine_kwargs.vllm.distributed_executor_backend",
            got=launcher,
            allowed=[LAUNCHER],
            fix="Leave it out.",
        )
    if on_cpu and int(arguments.get("pipeline_parallel_size") or 1) > 1:
        raise RolloutError(
            "vLLM's pipeline does not run on a CPU: its second stage has no memory for what the first one sends",
            key=f"{_R}.pipeline_model_parallel_size",
            got=arguments["pipeline_parallel_size"],
            allowed="1",
            fix=f"Set {_R}.tensor_model_parallel_size instead.",
        )
    if int(arguments.get("data_parallel_size") or 1) > 1:
        raise NotBuiltError(
            "a vLLM engine that is stepped here schedules for one data-parallel rank",
            key=f"{_R}.engine_kwargs.vllm.data_parallel_size",
            got=arguments["data_parallel_size"],
            allowed="1",
            fix="Leave it out: several replicas share the requests.",
        )


def check_model(facts: ModelFacts, on_cpu: bool) -> None:
    """Refuse what the engine's kernels cannot do, before it is started.

    Raises:
        RolloutError: the CPU build has no kernel for the model's attention heads.
    """
    if on_cpu and facts.head_dim and facts.head_dim not in CPU_HEAD_DIMS:
        raise RolloutError(
            "vLLM on CPU has no kernel for attention heads of this width",
            key="head_dim",
            got=facts.head_dim,
            allowed=CPU_HEAD_DIMS,
            fix="Set actor_rollout_ref.rollout.name=hf, which takes any.",
        )


def check_quantization(arguments: Mapping[str, Any], on_cpu: bool) -> None:
    """Refuse a format that the build has no kernels for, before the engine is started.

    Raises:
        RolloutError: FP8 on a CPU.
    """
    if on_cpu and arguments.get("quantization") == "fp8":
        raise RolloutError(
            "vLLM on CPU has no FP8 kernels",
            key=f"{_R}.quantization",
            got="fp8",
            fix=f"Set {_R}.name=hf, or {_R}.quantization=torchao with a file of its Int8WeightOnlyConfig.",
        )


def _overrides(rollout: RolloutConfig, model: HFModelConfig) -> dict[str, Any]:
    """Of the model's config.json; the second is where vLLM looks for torchao's configuration."""
    overrides = dict(model.override_config or {})
    file = rollout.quantization_config_file
    return overrides if file is None else {**overrides, "quantization_config_file": str(file)}


def _load_format(name: str, device: str, facts: ModelFacts, adapter: LoraSettings | None) -> str:
    """``dummy`` starts from random numbers, which leaves nothing to compare a reload with (see `VLLMSampler`), and no
    base for an adapter."""
    if name == "hf":
        return "safetensors"
    return "auto" if name == "dummy" and (device == "cpu" or facts.is_moe or adapter is not None) else name


def _context(rollout: RolloutConfig, facts: ModelFacts) -> int:
    """No longer than a run needs: vLLM reserves KV cache for one sequence of this length."""
    needed = int(rollout.prompt_length) + int(rollout.response_length)
    return int(rollout.max_model_len or min(needed, facts.max_model_len))


def _batched_tokens(rollout: RolloutConfig, facts: ModelFacts) -> int:
    """Without chunked prefill a step of vLLM must hold the longest sequence."""
    budget = int(rollout.max_num_batched_tokens)
    longest = _context(rollout, facts)
    if rollout.enable_chunked_prefill or longest <= budget:
        return budget
    notice(
        f"{_R}.max_num_batched_tokens",
        f"raised from {budget} to the context of {longest} tokens, since enable_chunked_prefill=false",
    )
    return longest
