"""Where a run's sampler is and how weights get there: ``rollout.checkpoint_engine``."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from verl import env
from verl.config.machine.pools import spec_of
from verl.config.schema.model import HFModelConfig
from verl.config.schema.node import replace
from verl.config.schema.rollout import RolloutConfig
from verl.device import torch_dtype
from verl.errors import ConfigError, suggest
from verl.metrics import notice
from verl.registry import SAMPLERS, TRANSPORTS, load_module
from verl.rollout.base import Sampler
from verl.rollout.devices import shown
from verl.rollout.hosted import HostedSampler
from verl.rollout.server.child import ChildHandle
from verl.rollout.server.sampler import ServerSampler, addresses
from verl.rollout.stream_check import shapes_on_disk
from verl.rollout.threaded import threaded
from verl.weight_sync import Transport

SAME_PROCESS = "naive"
RINGS = ("shared_memory", "cuda_ipc")
"""Transports that reserve memory for their largest bucket."""
_E = "actor_rollout_ref.rollout.checkpoint_engine"


def servers_of(rollout: RolloutConfig) -> list[str]:
    """Addresses of the servers that sample, where the engine is one that asks servers; empty where it is made here."""
    asks = rollout.name == "server" or (rollout.name == "sglang" and rollout.server.url)
    return addresses(rollout.server.url) if asks else []


def server_sampler(url: str, rollout: RolloutConfig, model: HFModelConfig, is_alone: bool) -> ServerSampler:
    """The sampler over one server; with several it does not retry, because another server answers sooner."""
    api = "sglang" if rollout.name == "sglang" else None
    return ServerSampler.one_of(rollout, model, url, api=api, max_attempts=None if is_alone else 1)


def place_sampler(
    rollout: RolloutConfig, model: HFModelConfig, device: str, is_colocated: bool = True, devices: Sequence[str] = ()
) -> Sampler:
    """The sampler of one worker: in its process, or with any other transport than ``naive`` in a child of it.

    Args:
        rollout, model: sections of the configuration.
        device: of the worker.
        is_colocated: the trainer lives in this process, too; in any other one the sampler needs no child.
        devices: of all ranks of the replica that this worker leads; empty: those that it sees.
    """
    with env.within(shown(devices, spec_of(rollout).devices, device)):
        return _made(rollout, model, device, is_colocated)


def _made(rollout: RolloutConfig, model: HFModelConfig, device: str, is_colocated: bool) -> Sampler:
    if not is_colocated and rollout.standalone_gpu_memory_utilization is not None:
        rollout = replace(rollout, gpu_memory_utilization=rollout.standalone_gpu_memory_utilization)
    if not is_colocated or rollout.checkpoint_engine.backend == SAME_PROCESS:
        sampler: Sampler = SAMPLERS.get(rollout.name).from_config(rollout, model, device=device)
        return sampler if is_colocated else threaded(sampler)
    kind, begin = transport_of(rollout, model, device)
    hosted = HostedSampler(ChildHandle(rollout, model, device, kind), kind, begin)
    atexit.register(hosted.close)
    return hosted


def transport_of(
    rollout: RolloutConfig, model: HFModelConfig, device: str, is_separate: bool = False, host: str | None = None
) -> tuple[str, Callable[[], Transport]]:
    """The transport that ``backend`` names, with ``engine_kwargs``, which may stand below its name.

    Args:
        is_separate: the sampler has separate devices; else it shares the trainer's.
        host: address of the trainer's machine for samplers on others, where ``engine_kwargs`` has no ``host``.

    Returns:
        Its name in the registry, and what makes the trainer's end of it.
    """
    engine = rollout.checkpoint_engine
    if engine.custom_backend_module:
        load_module(_as_module(engine.custom_backend_module))
    kind, options = engine.backend, dict(engine.engine_kwargs)
    options = dict(options.get(kind) or {}) if isinstance(options.get(kind), dict) else options
    if kind == "nccl":
        kind = _nccl_or(device, is_separate)
    if kind == "cuda_ipc" and device == "cpu":
        raise ConfigError("this transport needs a GPU", key=f"{_E}.backend", got=kind, fix="Take shared_memory.")
    below = options.get("over", "shared_memory") if kind.startswith("delta") else kind
    if host is not None and "host" in TRANSPORTS.get(below).options():
        options.setdefault("host", host)
    _check_options(kind, below, options)
    if kind.startswith("delta"):
        options["dtype"] = _dtype(rollout, device)
    size = int(engine.update_weights_bucket_megabytes) << 20
    if below in RINGS:
        size = min(size, _enough(model, size))
    return kind, partial(TRANSPORTS.get(kind).begin, size, device, **options)


def _nccl_or(device: str, is_separate: bool) -> str:
    """NCCL needs one device per rank, which a worker and a sampler in a separate pool have."""
    if device == "cpu":
        notice(f"{_E}.backend", "nccl needs GPUs: these weights are broadcast over gloo")
        return "gloo"
    if is_separate:
        return "nccl"
    notice(f"{_E}.backend", "nccl does not connect two processes on one GPU: these weights go by cuda_ipc")
    return "cuda_ipc"


def _check_options(kind: str, below: str, options: Mapping[str, Any]) -> None:
    """Refuse an argument that the transport does not have.

    Raises:
        ConfigError: naming it and the nearest one.
    """
    options_of_kinds = {name for one in {kind, below} for name in TRANSPORTS.get(one).options()}
    for name in options:
        if name not in options_of_kinds:
            raise ConfigError(
                f"the transport {kind!r} has no such argument",
                key=f"{_E}.engine_kwargs.{name}",
                got=options[name],
                allowed=sorted(options_of_kinds),
                fix=suggest(name, options_of_kinds),
            )


def _dtype(rollout: RolloutConfig, device: str) -> torch.dtype:
    """The dtype of the sampler's weights; deltas are of its bits."""
    auto = "float32" if device == "cpu" else "bfloat16"
    return torch_dtype(auto if rollout.dtype == "auto" else rollout.dtype)


def _enough(model: HFModelConfig, size: int) -> int:
    """Bytes for a bucket of all weights in their largest form; no ring needs more."""
    shapes = shapes_on_disk(str(model.path)) if Path(str(model.path)).is_dir() else None
    if shapes is None:
        return size
    return sum(8 * torch.Size(shape).numel() + 64 for shape in shapes.values())


def _as_module(name: str) -> str:
    """A file as it is, a dotted name as a package."""
    return name if name.endswith(".py") or "://" in name else f"pkg://{name}"
