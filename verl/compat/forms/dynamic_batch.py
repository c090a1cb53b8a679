"""Micro-batches within a token budget, for code that runs a model by hand; the engines plan their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from verl.algorithms.micro_batches import Plan, agree_on_micro_batches, plan_micro_batches, restore_order
from verl.device import accelerator
from verl.protocol import DataProto


def split_by_tokens(
    batch: Any,
    max_token_len: int,
    *,
    all_reduce_max: Callable[[int], int] | None = None,
    count_multiple: int | None = None,
    min_count: int | None = None,
    order_by_work: bool = True,
    group_size: int = 1,
) -> tuple[list[Any], Plan]:
    """Cut a TensorDict with ``attention_mask`` (B, L) into micro-batches of at most ``max_token_len`` tokens.

    Args:
        all_reduce_max: makes the number of micro-batches equal on all data-parallel ranks.
        order_by_work: little work at both ends; else in the order of their first rows.
        group_size: number of consecutive rows that stay together.

    Returns:
        The micro-batches and the row indices of each.
    """
    lengths = batch["attention_mask"].sum(dim=-1).tolist()

    def plan(count: int) -> Plan:
        return plan_micro_batches(
            lengths,
            max_tokens=max_token_len,
            group_ids=[row // group_size for row in range(len(lengths))] if group_size > 1 else None,
            min_count=max(count, min_count or 1),
            count_multiple=count_multiple or 1,
        )

    rows = agree_on_micro_batches(plan, all_reduce_max)
    rows = rows if order_by_work else sorted(rows)
    return [batch[part] for part in rows], rows


def restore_dynamic_batch(data: Tensor, batch_idx_list: Plan) -> Tensor:
    """Outputs concatenated over the micro-batches, back in the order of the rows; (B, ...) -> (B, ...)."""
    return data[restore_order(batch_idx_list)]


def rearrange_micro_batches(
    batch: Any, max_token_len: int, dp_group: Any = None, num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True, min_num_micro_batch: int | None = None, use_dynamic_bsz_balance: bool = True,
    force_group_size: int = 1,
) -> tuple[list[Any], list[list[int]]]:  # fmt: skip
    """A TensorDict as micro-batches of at most ``max_token_len`` tokens, and the rows of each."""

    def largest(count: int) -> int:
        most = torch.tensor(
            [count], device="cpu" if torch.distributed.get_backend(dp_group) == "gloo" else accelerator()
        )
        torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX, group=dp_group)  # all ranks, per attempt
        return int(most)

    together = same_micro_num_in_dp and dp_group is not None and torch.distributed.is_initialized()
    return split_by_tokens(
        batch, max_token_len, all_reduce_max=largest if together else None, count_multiple=num_batches_divided_by,
        min_count=min_num_micro_batch, order_by_work=use_dynamic_bsz_balance, group_size=force_group_size,
    )  # fmt: skip


def prepare_dynamic_batch(
    data: DataProto, max_token_len: int, dp_group: Any = None, num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True, min_num_micro_batch: int | None = None, use_dynamic_bsz_balance: bool = True,
) -> tuple[list[DataProto], list[list[int]]]:  # fmt: skip
    """`rearrange_micro_batches` of a `DataProto`."""
    _, rows = rearrange_micro_batches(
        data.batch, max_token_len, dp_group, num_batches_divided_by, same_micro_num_in_dp, min_num_micro_batch,
        use_dynamic_bsz_balance,
    )  # fmt: skip
    return [data.select_idxs(part) for part in rows], rows
