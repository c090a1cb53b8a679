"""Over-sampling with an early stop: once enough trajectories are done, the longest ones are given up.

What is given up comes back with the finish reason ``abort``; the dataflow masks it, so it is neither trained on nor in
the baseline of its group.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from verl.rollout.base import Completion, Request, Sampler

T = TypeVar("T")


@dataclass
class Stop:
    """Whether no more is to be sampled for a batch."""

    is_set: bool = False

    def answer(self, request: Request) -> Completion:
        """What a request gets that begins after the stop."""
        return Completion(request.id, (), (), "abort", ())


async def gather_most(tasks: Sequence[asyncio.Task[T]], rate: float, sampler: Sampler, stop: Stop) -> list[T]:
    """The results of all tasks in order; the last ``rate`` of them end early.

    Args:
        rate: share of the tasks that may be given up once the others are done; 0 waits for all.
        sampler: its requests in flight are aborted then.
        stop: set then; requests that begin later must not be sampled.
    """
    enough = math.ceil((1 - rate) * len(tasks))
    left = set(tasks)
    while len(tasks) - len(left) < enough:
        done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()  # the first failure ends the batch
    if left:
        stop.is_set = True
        await sampler.abort()
    return list(await asyncio.gather(*tasks))
