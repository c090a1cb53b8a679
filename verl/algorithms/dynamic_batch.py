"""Batches cut by a token budget and put together again: `micro_batches` applied to tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from verl.algorithms.micro_batches import Plan, agree_on_micro_batches, plan_micro_batches, restore_order


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
        group_size: so many consecutive rows stay together.

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
