"""A checksum of tensors that is as fast as reading them: integer sums over rows and columns, weighted by position.

It finds lost, repeated, swapped and flipped elements. It is no defence against deliberate tampering.
"""

from __future__ import annotations

import torch

WIDTH = 1024
WORD = 8
_ODD = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor, flat: what decides whether two values are the same (NaN payloads, -0.0 and all)."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.element_size() not in INTEGERS:
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(INTEGERS[flat.element_size()])


def checksum(tensor: torch.Tensor) -> int:
    """64 bits that depend on every bit of a tensor and on its place; the shape does not count.

    With x_ij the tensor's bytes as 8-byte words in rows of `WIDTH`: sum_j w_j sum_i x_ij + sum_i w_i sum_j x_ij
    (mod 2**64), where w_k is odd and differs for every k. Bytes that fill no word count as one word, with zeros.
    """
    data = as_integers(tensor).view(torch.uint8)
    if data.data_ptr() % WORD:
        data = data.clone()
    aligned = len(data) // WORD * WORD
    words, rest = data[:aligned].view(torch.int64), data[aligned:]
    num_tiled = len(words) // WIDTH * WIDTH
    total = _weighted(words[num_tiled:], 1)
    if num_tiled:
        rows = words[:num_tiled].view(-1, WIDTH)
        total += _weighted(rows.sum(0), 2) + _weighted(rows.sum(1), 3)
    if len(rest):
        total += _weighted(torch.cat([rest, rest.new_zeros(WORD - len(rest))]).view(torch.int64), 4)
    return (total + len(data)) & _MASK


def combine(parts: list[int]) -> int:
    """One checksum of several, in order."""
    total = 0
    for part in parts:
        total = (total * _ODD + part + 1) & _MASK
    return total


def _weighted(sums: torch.Tensor, salt: int) -> int:
    if not sums.numel():
        return 0
    index = torch.arange(1, sums.numel() + 1, device=sums.device)
    weights = (index * _signed(_ODD) + salt) * _signed(_ODD) | 1
    return int((sums * weights).sum()) & _MASK


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
