"""TorchTitan's modules, imported only where an engine needs them, and what a CPU needs before that."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
import warnings
from importlib.metadata import version
from types import ModuleType
from typing import Any

import torch

from verl.config.schema.torchtitan import INSTALL, NEEDED, VERSION
from verl.errors import ConfigError

_KERNELS = "torchtitan.distributed.minimal_async_ep.kernels"
_KERNEL_NAMES = (
    "copy_full_counts_to_peers_kernel",
    "copy_rows_to_peers_kernel",
    "expand_topk_grad_kernel",
    "fill_combine_metadata_kernel",
    "fill_dispatch_metadata_kernel",
    "invert_flat_indices_kernel",
    "reduce_topk_slots_kernel",
    "topk_scores_grad_kernel",
)


def import_torchtitan(module: str, device: str) -> ModuleType:
    """A module of TorchTitan, for models on a kind of device.

    Raises:
        ConfigError: it is not installed, does not fit torch, or is of a version that this engine was not written for.
    """
    try:
        utils = importlib.import_module("torchtitan.tools.utils")
        if device == "cpu":
            _for_cpu(utils)
        imported = importlib.import_module(f"torchtitan.{module}")
    except ModuleNotFoundError as error:
        if error.name not in NEEDED:
            raise
        raise ConfigError(
            f"TorchTitan is not installed ({error.name} is missing)",
            key="strategy",
            got="torchtitan",
            fix=f"{INSTALL} (without --no-deps it wants older datasets), or use strategy=fsdp2.",
        ) from error
    except ImportError as error:  # it takes names from torch that older versions lack
        raise ConfigError(
            f"TorchTitan cannot be imported with this torch: {error}",
            key="strategy",
            got=f"torchtitan {version('torchtitan')}, torch {torch.__version__}",
            fix="Install torch 2.13 or newer, or use strategy=fsdp2.",
        ) from error
    _check_version()
    return imported


def _check_version() -> None:
    if not version("torchtitan").startswith(VERSION):
        raise ConfigError(
            "the engine was written for another version of TorchTitan",
            key="strategy",
            got=version("torchtitan"),
            allowed=f"{VERSION}x",
            fix=INSTALL,
        )


def _for_cpu(utils: Any) -> None:
    """Let its models be imported without an accelerator.

    Its device type is bound where other modules import it, and is ``cuda`` by default; so it is set before they are.
    Its model packages import kernels in Triton, which has no CPU build; names stand in for them, because no model calls
    them that exchanges tokens by torch's own all-to-all. (A stand-in for Triton itself would break torch's own
    compiler, which looks whether Triton is there.)
    """
    utils.device_type, utils.device_module = "cpu", torch.cpu
    # Routers request float32 under autocast, which a CPU does not have; they compute in float32 anyway.
    warnings.filterwarnings("ignore", message="In CPU autocast, but the target dtype is not supported")
    if _KERNELS not in sys.modules and importlib.util.find_spec("triton") is None:
        kernels = types.ModuleType(_KERNELS)
        for name in _KERNEL_NAMES:
            setattr(kernels, name, None)
        sys.modules[_KERNELS] = kernels
