"""Megatron-Core on a machine without CUDA: answers for the CUDA calls that it makes on its way.

Importing this module replaces functions of torch.cuda and names inside Megatron-Core, each named below. It touches no
collective: what goes over gloo is what Megatron-Core sends. It is for tests; the library never imports it.

Replaced: torch.cuda.{current_device, synchronize, current_stream, get_rng_state, set_rng_state (both also in
torch.cuda.random), manual_seed, default_generators, _lazy_call, nvtx.range_push, nvtx.range_pop, Event, Stream,
stream}; torch.Tensor.cuda; ``torch`` as three modules of Megatron-Core see it (pipeline_parallel.schedules,
transformer.utils, transformer.moe.moe_utils), where ``device="cuda"`` becomes the CPU;
transformer.moe.moe_utils.te_general_gemm (absent); transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import types

import torch

FACTORIES = ("empty", "zeros", "ones", "tensor")
SEEN_BY = ("pipeline_parallel.schedules", "transformer.utils", "transformer.moe.moe_utils")


class _Nothing:
    """A stream or an event: there is only one order of work on a CPU."""

    def __init__(self, *args, **kwargs):
        pass

    def __getattr__(self, name):
        return lambda *args, **kwargs: _Nothing()


class _TorchOnCPU(types.ModuleType):
    """torch, with factories that take a CUDA device for the CPU; torch itself stays as it is for everyone else."""

    def __getattr__(self, name):
        found = getattr(torch, name)
        return _on_cpu(found) if name in FACTORIES else found


def _as_on_cpu(tensor, as_numpy=False, record_stream=False):
    """What the dispatcher gets of a CUDA tensor: a tensor that is on the CPU already need only become an array."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _on_cpu(function):
    @functools.wraps(function)
    def made(*args, **kwargs):
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)

    return made


def install() -> None:
    """Replace the functions, once."""
    if getattr(torch.cuda, "_answered_by_cpu", False):
        return
    torch.cuda._answered_by_cpu = True
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda *args, **kwargs: None
    torch.cuda.current_stream = lambda *args, **kwargs: _Nothing()
    for module in (torch.cuda, torch.cuda.random):
        module.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
        module.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    torch.cuda.manual_seed = torch.default_generator.manual_seed
    torch.cuda.default_generators = {"cpu": torch.default_generator}
    torch.cuda._lazy_call = lambda call, **kwargs: call()
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *args: None
    torch.cuda.Event = torch.cuda.Stream = _Nothing
    torch.cuda.stream = lambda *args: contextlib.nullcontext()
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    for name in SEEN_BY:
        importlib.import_module(f"megatron.core.{name}").torch = _TorchOnCPU("torch")
    importlib.import_module("megatron.core.transformer.moe.moe_utils").te_general_gemm = None
    dispatcher = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    dispatcher.maybe_move_tensor_to_cpu = _as_on_cpu


install()
