"""Gathering a batch over the processes of a group, without pickle."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from verl.protocol.batch import DataProto
from verl.protocol.disk import deserialize, serialize
from verl.protocol.fields import PAD_TOKEN_KEY


def all_gather_data_proto(data: DataProto, process_group: Any = None) -> None:
    """Replace, in place, this rank's rows by the rows of all ranks in rank order; ``meta_info`` stays this rank's own.

    Every rank of the group calls it. Ranks may have different numbers of rows and different padded widths (the rows are
    padded to the longest by declaration). Non-tensor columns must hold values that `DataProto.save_to_disk` accepts.
    """
    if dist.get_world_size(process_group) == 1:
        return
    device = _transfer_device(process_group)
    pieces = list(serialize(data.select(meta_info_keys=[])))
    mine = np.concatenate(pieces)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(process_group))]
    dist.all_gather(sizes, torch.tensor([mine.size], device=device), group=process_group)
    padded = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8, device=device)
    padded[: mine.size] = torch.from_numpy(mine)
    received = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(received, padded, group=process_group)
    contents = [content[: int(size)].cpu().numpy().tobytes() for content, size in zip(received, sizes)]
    parts = [deserialize(DataProto, content) for content in contents]
    pad_token = {key: value for key, value in data.meta_info.items() if key == PAD_TOKEN_KEY}
    for part in parts:
        part.meta_info.update(pad_token)
    gathered = DataProto.concat(parts)
    if gathered.batch is not None and data.batch is not None and data.batch.device is not None:
        gathered.to(data.batch.device)
    data.batch, data.non_tensor_batch = gathered.batch, gathered.non_tensor_batch


def _transfer_device(process_group: Any) -> torch.device:
    """The CPU wherever the group can move CPU memory, else the accelerator its backend is made for."""
    backends = dist.get_backend_config(process_group)  # "cpu:gloo,cuda:nccl" or "cuda:nccl"
    accelerator = torch.accelerator.current_accelerator()
    if "cpu:" in backends or accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())
