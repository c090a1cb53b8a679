"""A packed row cut into equal slices over the ranks that share it, and put together again, for models of users' own.

The engines cut rows themselves (`verl.engines.packing`); this is for code that runs a model by hand.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from verl.device import AutogradContext

_group: dist.ProcessGroup | None = None


def set_sequence_group(group: dist.ProcessGroup | None) -> None:
    """The ranks that share sequences from now on in this process; None: it shares with nobody."""
    global _group
    _group = group


def sequence_group_size(group: dist.ProcessGroup | None = None) -> int:
    """Ranks of ``group``, or of the one that `set_sequence_group` named; 1 without either."""
    group = _group if group is None else group
    return 1 if group is None else dist.get_world_size(group)


def pad_and_slice(
    input_ids_rmpad: Tensor,
    position_ids_rmpad: Tensor | None = None,
    sp_size: int = 1,
    skip_position_ids_rmpad: bool = False,
    pad_value: int = 0,
) -> tuple[Tensor, Tensor | None, int]:
    """This rank's slice of a packed row, padded so that ``sp_size`` divides it.

    Args:
        input_ids_rmpad: (1, N). position_ids_rmpad: (..., N).
        skip_position_ids_rmpad: leaves the padded positions whole.

    Returns:
        The slices, (1, ceil(N / size)) and (..., ceil(N / size)), and how many tokens were added to the whole row.
    """
    ids, positions, added = pad(input_ids_rmpad, position_ids_rmpad, sp_size, pad_value)
    if sp_size == 1:
        return ids, positions, added
    number = dist.get_rank(_group)
    if positions is not None and not skip_position_ids_rmpad:
        positions = positions.chunk(sp_size, dim=-1)[number]
    return ids.chunk(sp_size, dim=-1)[number], positions, added


def pad(
    input_ids_rmpad: Tensor, position_ids_rmpad: Tensor | None = None, sp_size: int = 1, pad_value: int = 0
) -> tuple[Tensor, Tensor | None, int]:
    """As `pad_and_slice`, and nothing is cut; added positions are 0, 1, 2, ...: a row of their own."""
    added = -input_ids_rmpad.shape[-1] % sp_size
    ids, positions = torch.nn.functional.pad(input_ids_rmpad, (0, added), value=pad_value), position_ids_rmpad
    if positions is not None:
        more = torch.arange(added, device=positions.device, dtype=positions.dtype)
        positions = torch.cat([positions, more.expand(*positions.shape[:-1], added)], dim=-1)
    return ids, positions, added


def gather_and_unpad(
    x: Tensor,
    gather_dim: int,
    unpad_dim: int | None = None,
    padding_size: int = 0,
    grad_scaler: bool = True,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """The slices of all ranks along ``gather_dim``, without the last ``padding_size`` of ``unpad_dim``. Gradients flow.

    Without a group that shares it is ``x`` itself. Backwards each rank keeps the gradient of its own slice, with
    ``grad_scaler`` times the number of ranks: every rank computes the same loss from the whole, and gradients are
    averaged over ranks.
    """
    group = _group if group is None else group
    if group is None:
        return x
    gathered = _Gather.apply(x, gather_dim, grad_scaler, group)  # type: ignore[no-untyped-call]
    if unpad_dim is None or not padding_size:
        return gathered
    return gathered.narrow(unpad_dim, 0, gathered.shape[unpad_dim] - padding_size)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, dim: int, scale_gradient: bool, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        ctx.factor = dist.get_world_size(group) if scale_gradient else 1
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
        # Every rank of the sequence, once per pass; backwards each takes its slice and nothing is sent.
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim=dim)

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Tensor) -> tuple[Tensor | None, ...]:
        local = grads[0].chunk(dist.get_world_size(ctx.group), dim=ctx.dim)[dist.get_rank(ctx.group)]
        return local * ctx.factor, None, None, None
