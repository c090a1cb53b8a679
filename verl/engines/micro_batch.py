"""Which rows go through the model together where rows are padded to the longest of them.

Rows of like length belong together, so they are sorted before they are cut; a budget counts the padding too, because
the model computes it. (A layout without padding takes `verl.algorithms.micro_batches`, which balances mixed lengths.)
The cut never changes a result: losses are normalised over the mini-batch.
"""

from __future__ import annotations

from collections.abc import Sequence

from verl.errors import ConfigError


def plan_padded(
    lengths: Sequence[int], micro_batch_size: int | None = None, max_tokens: int | None = None
) -> list[list[int]]:
    """Cut rows into micro-batches, longest first.

    Args:
        lengths: tokens per row.
        micro_batch_size: at most that many rows each.
        max_tokens: rows times the longest of them stays within this budget.

    Returns:
        Index lists that together hold every row once.

    Raises:
        ConfigError: a limit is not positive, or one row alone exceeds the budget.
    """
    check_limits(lengths, micro_batch_size, max_tokens)
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    plan: list[list[int]] = []
    for row in order:
        rows = len(plan[-1]) if plan else 0
        full = micro_batch_size is not None and rows >= micro_batch_size
        if rows and max_tokens is not None:
            full = full or (rows + 1) * lengths[plan[-1][0]] > max_tokens
        if not rows or full:
            plan.append([row])
        else:
            plan[-1].append(row)
    return plan


def plan_together(
    lengths: Sequence[int], together: int, micro_batch_size: int | None = None, max_tokens: int | None = None
) -> list[list[int]]:
    """As `plan_padded`, with every ``together`` consecutive rows in one micro-batch and in their order.

    Raises:
        ConfigError: see `plan_padded`; also rows that belong together and exceed the budget.
    """
    assert len(lengths) % together == 0, "the last rows lack their fellows"
    units = [max(lengths[first : first + together]) for first in range(0, len(lengths), together)]
    if max_tokens is not None and max(units, default=0) * together > max_tokens:
        raise ConfigError(
            f"the token budget of a micro-batch is smaller than {together} rows that belong together",
            key="max_token_len_per_gpu",
            got=max_tokens,
            fix=f"Raise it to {max(units) * together} or more.",
        )
    plan = plan_padded(
        units,
        None if micro_batch_size is None else max(1, micro_batch_size // together),
        None if max_tokens is None else max_tokens // together,
    )
    return [[unit * together + n for unit in part for n in range(together)] for part in plan]


def check_limits(lengths: Sequence[int], micro_batch_size: int | None, max_tokens: int | None) -> None:
    if micro_batch_size is not None and micro_batch_size < 1:
        raise ConfigError(
            "a micro-batch must hold at least one row", key="micro_batch_size_per_gpu", got=micro_batch_size
        )
    longest = max(lengths, default=0)
    if max_tokens is not None and longest > max_tokens:
        raise ConfigError(
            f"the token budget of a micro-batch is smaller than the longest row ({longest} tokens)",
            key="max_token_len_per_gpu",
            got=max_tokens,
            fix=f"Raise it to {longest} or more (prompt plus response length).",
        )
