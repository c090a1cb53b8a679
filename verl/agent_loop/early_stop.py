"""Over-sampling with an early stop: once enough trajectories are done, the longest ones are given up, or resumed later.

What is given up comes back with the finish reason ``abort``; the dataflow masks it, so it is neither trained on nor in
the baseline of its group. What resumes in a later batch (`verl.agent_loop.unfinished`) comes back with its state.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TypeVar

from verl.agent_loop.unfinished import Members
from verl.rollout.base import Completion, Request

T = TypeVar("T")


@dataclass
class Stop:
    """Whether no more is to be sampled for a batch.

    Args:
        batch: tells batches apart where their loops run in other processes.
        keeps: what is not done then resumes in a later batch; else it is given up.
    """

    is_set: bool = False
    batch: int = field(default_factory=count().__next__)
    keeps: bool = False

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


async def gather_prompts(
    tasks: Sequence[asyncio.Task[T]],
    members: Members,
    enough: int,
    stop: Callable[[], Awaitable[None]],
    complete: Callable[[Sequence[int]], None],
) -> list[T]:
    """The results of all tasks in order; those that are left end early once enough prompts have all samples.

    Args:
        members: the prompt of each task.
        stop: as in `gather_most`.
        complete: called with the tasks of a prompt as the last of them ends before the stop.
    """
    number_of = {task: number for number, task in enumerate(tasks)}
    left = set(tasks)
    while left and members.num_complete < enough:
        done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
        for task in sorted(done, key=number_of.__getitem__):
            task.result()  # the first failure ends the batch
            if rows := members.end(number_of[task]):
                complete(rows)
    if left:
        await stop()
    return list(await asyncio.gather(*tasks))
