"""The one place that knows cuda, rocm, npu and cpu: which device a run uses, its threads, its memory, its dtypes."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import FunctionCtx

from verl import env
from verl.errors import ConfigError

DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "float": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "half": torch.float16,
}


class AutogradContext(FunctionCtx):
    """What torch hands to ``forward`` and ``backward`` of an `autograd.Function`; one may put any attribute on it."""

    saved_tensors: tuple[torch.Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: object) -> None: ...

        def save_for_backward(self, *tensors: torch.Tensor | None) -> None: ...


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Names of glibc's settings (malloc.h)."""
KEPT_BLOCK, KEPT_BYTES = 32 << 20, 512 << 20
"""Freed blocks up to this size are kept, as long as there are no more bytes at the end of the heap than these."""


def torch_dtype(name: str | torch.dtype) -> torch.dtype:
    """``'bf16'``, ``'bfloat16'``, ``'torch.bfloat16'`` or a dtype -> the dtype."""
    if isinstance(name, torch.dtype):
        return name
    try:
        return DTYPES[str(name).removeprefix("torch.")]
    except KeyError:
        raise ConfigError("unknown dtype", got=name, allowed=sorted(DTYPES)) from None


def accelerator() -> str | None:
    """``'cuda'`` (ROCm answers to that name too), ``'npu'`` or None."""
    if torch.cuda.is_available():
        return "cuda"
    npu = getattr(torch, "npu", None)  # torch_npu adds this module when it is installed
    return "npu" if npu is not None and npu.is_available() else None


def device_count(kind: str) -> int:
    """How many devices of a kind this machine has; the CPU counts as one."""
    if kind == "cuda":
        return torch.cuda.device_count()
    if kind == "npu":
        return torch.get_device_module(kind).device_count()
    return 1


def visible_gpus() -> list[str]:
    """The names of this process's GPUs, as CUDA_VISIBLE_DEVICES has them: numbers, or what a scheduler wrote there."""
    named = env.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(number) for number in range(device_count("cuda"))]


def resolve_device(name: str | None) -> str:
    """``None`` or ``'auto'`` -> the accelerator if there is one, else ``'cpu'``; a named kind must exist."""
    if name in (None, "auto"):
        return accelerator() or "cpu"
    if name == "cpu" or name == accelerator():
        return str(name)
    found = accelerator() or "cpu"
    raise ConfigError(
        "this machine has no such device",
        key="trainer.device",
        got=name,
        allowed=sorted({"cpu", found}),
        fix=f"Set trainer.device={found} or leave it out.",
    )


def device_name(kind: str) -> str:
    """The vendor's name of the device, ``cpu`` for a CPU."""
    if kind == "cuda":
        return torch.cuda.get_device_name()
    return kind


def usable_cores() -> int:
    """Cores this process may run on; all of them where the system cannot tell (macOS)."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def set_threads(count: int | None = None) -> int:
    """Torch's thread count, set by the library itself so that it is the same in every runtime.

    Without ``count``: the value of OMP_NUM_THREADS if the shell set it, else the number of cores this process may use.
    """
    num_threads = count or env.get_int("OMP_NUM_THREADS", usable_cores())
    torch.set_num_threads(num_threads)
    return num_threads


def autocast(device: str, dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Mixed precision for the forward pass; nothing to do in float32."""
    if dtype == torch.float32:
        return nullcontext()
    return torch.autocast(device_type=device, dtype=dtype)


def keep_freed_memory() -> None:
    """Let this process's allocator keep freed blocks for the next tensors, until `give_memory_back`.

    By default glibc returns them to the system, and maps them again: a tenth of the time of sampling or training a
    small model on a CPU goes into fresh pages. What the shell says of its allocator wins (``MALLOC_MMAP_THRESHOLD_``,
    ``MALLOC_TRIM_THRESHOLD_``, ``GLIBC_TUNABLES``).
    """
    is_set = any(env.get(name) for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"))
    mallopt = _glibc("mallopt")
    if mallopt is not None and not is_set:
        mallopt(M_MMAP_THRESHOLD, KEPT_BLOCK)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


def give_memory_back(device: str) -> None:
    """Return memory that was freed to the machine: allocators keep it otherwise, on the host as on an accelerator."""
    if device == "cuda":
        torch.cuda.empty_cache()
    trim = _glibc("malloc_trim")
    if trim is not None:
        trim(0)


def _glibc(name: str) -> Callable[..., int] | None:
    """A function that glibc alone has; None where another allocator serves this process."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None


def free_host_memory(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of host memory that this process can still take: the machine's, or less where its control group is limited.

    Swap space counts: who uses it is slow, and not killed.

    Args:
        root: folder of the control group (version 2); the page cache in it counts as free.
    """
    import psutil

    free, swap = int(psutil.virtual_memory().available), int(psutil.swap_memory().free)
    try:
        limit, used = (int((root / name).read_text()) for name in ("memory.max", "memory.current"))
        sizes = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
        cached = sum(int(sizes[name]) for name in ("active_file", "inactive_file"))
    except (OSError, ValueError, KeyError):  # no such group, or no limit ("max")
        return free + swap
    return min(free, limit - used + cached) + swap


def memory_now(device: str) -> dict[str, float]:
    """Memory in use at this moment, in GB: resident on the host, and allocated on the accelerator."""
    import psutil

    found = {"host_gb": psutil.Process().memory_info().rss / 1e9}
    if device == "cuda":
        found["device_gb"] = torch.cuda.memory_allocated() / 1e9
        found["device_reserved_gb"] = torch.cuda.memory_reserved() / 1e9
    return found


def memory_metrics(device: str) -> dict[str, float]:
    """Memory in GB under upstream's metric names; on CPU only the resident set."""
    import psutil

    found = {"perf/cpu_memory_used_gb": psutil.Process().memory_info().rss / 1e9}
    if device == "cuda":
        found["perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated() / 1e9
        found["perf/max_memory_reserved_gb"] = torch.cuda.max_memory_reserved() / 1e9
    return found
