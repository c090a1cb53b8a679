"""Micro-batches of at most so many tokens, for code that runs a model by hand; the engines plan their own."""

from __future__ import annotations

from typing import Any

import torch

from verl.algorithms.dynamic_batch import split_by_tokens
from verl.device import accelerator
from verl.protocol import DataProto


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
