"""Over-sampling with an early stop: once enough trajectories are done, the longest ones are given up.

What is given up comes back with the finish reason ``abort``; the dataflow masks it, so it is neither trained on nor in
the baseline of its group.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TypeVar

from verl.rollout.base import Completion, Request

T = TypeVar("T")


@dataclass
class Stop:
    """Whether no more is to be sampled for a batch.

    Args:
        batch: tells batches apart where their loops run in other processes.
    """

    is_set: bool = False
    batch: int = field(default_factory=count().__next__)

    def answer(self, request: Request) -> Completion:
        """What a request gets that begins after the stop."""
        return Completion(request.id, (), (), "abort", ())


async def gather_most(tasks: Sequence[asyncio.Task[T]], rate: float, stop: Callable[[], Awaitable[None]]) -> list[T]:
    """The results of all tasks in order; the last ``rate`` of them end early.

    Args:
        rate: share of the tasks that may be given up once the others are done; 0 waits for all.
        stop: called then; requests in flight come back with what they have, and later ones are not sampled.
    """
    enough = math.ceil((1 - rate) * len(tasks))
    left = set(tasks)
    while len(tasks) - len(left) < enough:
        done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()  # the first failure ends the batch
    if left:
        await stop()
    return list(await asyncio.gather(*tasks))
