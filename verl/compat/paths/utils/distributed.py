"""Process groups under upstream's path."""

import torch.distributed as dist

from verl import env
from verl.compat import absent_names
from verl.utils.device import get_nccl_backend, get_torch_device

__getattr__ = absent_names(__name__)


def initialize_global_process_group(timeout_second: int = 36000) -> tuple[int, int, int]:
    """Join the processes that torchrun started, on the device of its local rank; (local rank, rank, world size)."""
    from datetime import timedelta

    local, address = env.get_int("LOCAL_RANK", 0), env.get("DIST_INIT_METHOD") or None
    get_torch_device().set_device(local)
    rank, size = env.get_int("RANK", 0), env.get_int("WORLD_SIZE", 1)
    dist.init_process_group(get_nccl_backend(), address, timedelta(seconds=timeout_second), size, rank)
    return local, rank, size


def destroy_global_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
