"""Masked operators, kernels, padding and schedules under the path that users' code imports them from."""

from typing import Any

import torch

from verl.algorithms.logprob import entropy_from_logits, entropy_from_logits_with_chunking, logprobs_from_logits
from verl.algorithms.masked import masked_mean, masked_sum, masked_var, masked_whiten
from verl.algorithms.schedules import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_wsd_schedule_with_warmup,
)
from verl.compat.forms.sequences import (
    clip_by_value,
    compute_grad_norm,
    get_response_mask,
    pad_2d_list_to_length,
    pad_sequence_to_length,
    postprocess_data,
    split_dict_tensor_into_batches,
    tokenize_and_postprocess_data,
)


def allgather_dict_tensors(tensors: Any, size: int, group: torch.distributed.ProcessGroup, dim: int = 0) -> Any:
    """The tensors of all ranks of a group joined by name; collective."""
    made = {}
    for name in sorted(tensors.keys()):
        parts = [torch.empty_like(tensors[name]) for _ in range(size)]
        torch.distributed.all_gather(parts, tensors[name].contiguous(), group=group)  # every rank, in order of names
        made[name] = torch.cat(parts, dim=dim)
    return type(tensors)(made) if isinstance(tensors, dict) else type(tensors)(made, [len(made[name])])
