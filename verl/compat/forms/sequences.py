"""Masks, position ids and padding of token sequences. Shapes: B rows, L positions of a whole row, T of a response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from verl.errors import ConfigError, DataError

TRUNCATIONS = ("error", "left", "right", "middle")


def get_response_mask(
    response_id: Tensor, eos_token: int | Sequence[int] = 2, dtype: torch.dtype = torch.int64
) -> Tensor:
    """(B, T): 1 up to and including the first end-of-sequence token of each row, 0 after it; all 1 without one.

    Args:
        eos_token: one id, or several of which any ends the response.
    """
    ends = torch.as_tensor([eos_token] if isinstance(eos_token, int) else list(eos_token), device=response_id.device)
    is_end = torch.isin(response_id, ends).long()
    return ((is_end.cumsum(dim=-1) - is_end) == 0).to(dtype)


def compute_position_id_with_mask(mask: Tensor) -> Tensor:
    """(B, L) attention mask -> position ids that count the real tokens from 0; 0 on left padding."""
    return (mask.long().cumsum(dim=-1) - 1).clamp(min=0)


def create_random_mask(
    input_ids: Tensor,
    max_ratio_of_valid_token: float,
    max_ratio_of_left_padding: float,
    min_ratio_of_valid_token: float = 0,
) -> Tensor:
    """(B, L) int64: an attention mask with random left padding, random length and right padding, for tests.

    Args:
        max_ratio_of_valid_token, min_ratio_of_valid_token: the share of L that is real, at least one token.
        max_ratio_of_left_padding: the share of L that is padded on the left at most.
    """
    if not 0 <= min_ratio_of_valid_token <= max_ratio_of_valid_token <= 1:
        raise ConfigError("the ratios must satisfy 0 <= min <= max <= 1", key="max_ratio_of_valid_token")
    rows, width = input_ids.shape
    least = max(1, int(width * min_ratio_of_valid_token))
    valid = torch.randint(least, max(least, int(width * max_ratio_of_valid_token)) + 1, (rows, 1))
    left_limit = torch.minimum(torch.tensor(int(width * max_ratio_of_left_padding)), width - valid)
    left = (torch.rand(rows, 1) * (left_limit + 1)).long()
    position = torch.arange(width)
    return ((position >= left) & (position < left + valid)).long().to(input_ids.device)


def pad_sequence_to_length(tensors: Tensor, max_seq_len: int, pad_token_id: int, left_pad: bool = False) -> Tensor:
    """(..., L) -> (..., max_seq_len); a tensor that is as long already is returned as it is."""
    missing = max_seq_len - tensors.shape[-1]
    if missing <= 0:
        return tensors
    return torch.nn.functional.pad(tensors, (missing, 0) if left_pad else (0, missing), value=pad_token_id)


def pad_2d_list_to_length(
    response: Sequence[Sequence[int]], pad_token_id: int, max_length: int | None = None
) -> Tensor:
    """Lists of token ids -> (B, L) int64, padded on the right to the longest, or to ``max_length`` if that is more."""
    width = max([len(row) for row in response] + [max_length or 0])
    padded = torch.full((len(response), width), pad_token_id, dtype=torch.int64)
    for row, tokens in enumerate(response):
        padded[row, : len(tokens)] = torch.as_tensor(tokens, dtype=torch.int64)
    return padded


def postprocess_data(
    input_ids: Tensor,
    attention_mask: Tensor,
    max_length: int,
    pad_token_id: int,
    left_pad: bool = True,
    truncation: str = "error",
) -> tuple[Tensor, Tensor]:
    """Pad or cut (B, L) token ids and their mask to exactly ``max_length``.

    Args:
        truncation: what happens to longer rows: ``error``; ``left`` and ``right`` drop tokens on that side; ``middle``
            keeps both ends.
    """
    if truncation not in TRUNCATIONS:
        raise ConfigError("unknown truncation", key="data.truncation", got=truncation, allowed=TRUNCATIONS)
    length = input_ids.shape[-1]
    if length <= max_length:
        return (
            pad_sequence_to_length(input_ids, max_length, pad_token_id, left_pad),
            pad_sequence_to_length(attention_mask, max_length, 0, left_pad),
        )
    if truncation == "error":
        raise DataError(
            f"a sequence of {length} tokens is longer than {max_length}",
            key="data.max_prompt_length",
            fix="Raise the limit, or set data.truncation to left, right or middle.",
        )
    head = {"left": 0, "right": max_length, "middle": max_length // 2}[truncation]
    positions = torch.cat([torch.arange(head), torch.arange(length - (max_length - head), length)]).to(input_ids.device)
    return input_ids[..., positions], attention_mask[..., positions]


def tokenize_and_postprocess_data(
    prompt: str, tokenizer: Any, max_length: int, pad_token_id: int, left_pad: bool = True, truncation: str = "error"
) -> tuple[Tensor, Tensor]:
    """`postprocess_data` of a prompt's token ids, (1, max_length); no special tokens are added."""
    encoded = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    return postprocess_data(
        encoded["input_ids"], encoded["attention_mask"], max_length, pad_token_id, left_pad, truncation
    )


def clip_by_value(x: Tensor, tensor_min: Tensor, tensor_max: Tensor) -> Tensor:
    """Elementwise ``max(min(x, tensor_max), tensor_min)``."""
    return torch.maximum(torch.minimum(x, tensor_max), tensor_min)


def compute_grad_norm(model: torch.nn.Module) -> float:
    """The L2 norm over all gradients that the module's parameters have."""
    gradients = [p.grad.detach().float().norm() for p in model.parameters() if p.grad is not None]
    return torch.stack(gradients).norm().item() if gradients else 0.0


def split_dict_tensor_into_batches(tensors: Any, batch_size: int) -> list[Any]:
    """A TensorDict cut into pieces of ``batch_size`` rows; the rows must divide."""
    if len(tensors) % batch_size:
        raise ConfigError(f"{len(tensors)} rows do not divide into pieces of {batch_size}")
    return list(tensors.split(batch_size))


def unpad_input(hidden_states: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """(B, T, ...) -> (N, ...), its places in B * T, where each row begins (B + 1,) int32, the longest, lengths (B,)."""
    lengths = attention_mask.sum(dim=-1, dtype=torch.int32)
    indices = attention_mask.flatten().nonzero().flatten()
    starts = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, starts, int(lengths.max()), lengths


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """(N, ...) -> (batch, seqlen, ...) with zeros where no token is."""
    padded = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    return padded.index_copy(0, indices, hidden_states).unflatten(0, (batch, seqlen))


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    """The rows at these places; gradients flow."""
    return x.index_select(0, indices)
