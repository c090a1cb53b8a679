"""The device under upstream's names; `verl.device` knows them."""

from typing import Any

import torch

from verl import device

is_cuda_available = device.accelerator() == "cuda"
is_npu_available = device.accelerator() == "npu"


def get_device_name() -> str:
    """``cuda``, ``npu`` or ``cpu``."""
    return device.resolve_device(None)


def get_torch_device() -> Any:
    """Torch's module of that device: ``torch.cuda``, ``torch.npu``, ``torch.cpu``."""
    return torch.get_device_module(get_device_name())


def get_device_id() -> Any:
    """What ``tensor.to`` takes for this process's device: its number, or ``"cpu"``."""
    return get_torch_device().current_device()


def get_nccl_backend() -> str:
    """The collectives between devices of that kind: nccl, hccl or gloo."""
    return {"cuda": "nccl", "npu": "hccl"}.get(get_device_name(), "gloo")


def get_resource_name() -> str:
    """What Ray counts: GPU, NPU or CPU."""
    return {"cuda": "GPU"}.get(get_device_name(), get_device_name().upper())


def get_visible_devices_keyword() -> str:
    """The variable that narrows the devices of a process."""
    return "ASCEND_RT_VISIBLE_DEVICES" if is_npu_available else "CUDA_VISIBLE_DEVICES"


def set_expandable_segments(enable: bool) -> None:
    """Whether torch's allocator on CUDA may grow its segments; elsewhere there are none."""
    if is_cuda_available:
        torch.cuda.memory._set_allocator_settings(f"expandable_segments:{enable}")


def auto_set_device(config: Any) -> None:
    """Nothing to do: without ``trainer.device`` a run takes the accelerator that there is."""
