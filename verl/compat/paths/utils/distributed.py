"""Process groups under upstream's path."""

import torch.distributed as dist

from verl import env
from verl.compat import absent_names
from verl.utils.device import get_device_name, get_nccl_backend

__getattr__ = absent_names(__name__)


def initialize_global_process_group(timeout_second: int = 36000) -> tuple[int, int, int]:
    """Join the processes that torchrun started; (local rank, rank, world size)."""
    from datetime import timedelta

    dist.init_process_group(get_nccl_backend(), timeout=timedelta(seconds=timeout_second))
    return env.get_int("LOCAL_RANK", 0), dist.get_rank(), dist.get_world_size()


def destroy_global_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
