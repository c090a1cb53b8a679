"""Masked operators, kernels, padding and schedules under the path that users' code imports them from."""

from verl.algorithms.logprob import entropy_from_logits, entropy_from_logits_with_chunking, logprobs_from_logits
from verl.algorithms.masked import masked_mean, masked_sum, masked_var, masked_whiten
from verl.algorithms.schedules import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_wsd_schedule_with_warmup,
)
from verl.algorithms.sequences import (
    clip_by_value,
    compute_grad_norm,
    get_response_mask,
    pad_2d_list_to_length,
    pad_sequence_to_length,
    postprocess_data,
    split_dict_tensor_into_batches,
    tokenize_and_postprocess_data,
)

__all__ = [
    "clip_by_value",
    "compute_grad_norm",
    "entropy_from_logits",
    "entropy_from_logits_with_chunking",
    "get_constant_schedule_with_warmup",
    "get_cosine_schedule_with_warmup",
    "get_response_mask",
    "get_wsd_schedule_with_warmup",
    "logprobs_from_logits",
    "masked_mean",
    "masked_sum",
    "masked_var",
    "masked_whiten",
    "pad_2d_list_to_length",
    "pad_sequence_to_length",
    "postprocess_data",
    "split_dict_tensor_into_batches",
    "tokenize_and_postprocess_data",
]
