"""Scores each trajectory as soon as it ends, overlapped with the sampling of the others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from verl.agent_loop.base import AgentLoopOutput
from verl.agent_loop.batch import array_of_objects, to_batch
from verl.errors import RolloutError
from verl.metrics import Metric
from verl.protocol import DataProto
from verl.rewards.managers.rows import EARLY

ScoreRow = Callable[[DataProto], Awaitable[Any]]
"""A batch of one row -> its result, as plain values (`verl.rewards.early.EarlyScorer.score`)."""


class OverlappedScoring:
    """The scoring of one batch.

    Args:
        score: scores a row.
        rows: the columns of each row of the batch.
        pad_token_id: of the policy.
    """

    def __init__(self, score: ScoreRow, rows: Sequence[Mapping[str, Any]], pad_token_id: int):
        self._score, self._rows, self._pad = score, rows, pad_token_id
        self._tasks: dict[int, asyncio.Task[Any]] = {}
        self._ended: dict[int, float] = {}

    def start(self, number: int, output: AgentLoopOutput) -> None:
        """Begin to score a trajectory; one that its loop has scored needs nothing."""
        if output.reward_score is None:
            self._tasks[number] = asyncio.ensure_future(self._one(number, output))

    async def finish(self, outputs: Sequence[AgentLoopOutput], batch: DataProto) -> dict[str, Metric]:
        """Wait for what is still being scored and put all results into the batch.

        Raises:
            RolloutError: a row could not be given to its scorer; what a scorer does wrong is in its result.
        """
        sampled_at = time.perf_counter()
        try:
            await asyncio.gather(*self._tasks.values())
        finally:
            self.cancel()
        waited = time.perf_counter() - sampled_at
        results = [self._tasks[i].result() if i in self._tasks else None for i in range(len(outputs))]
        batch.non_tensor_batch[EARLY] = array_of_objects(results)
        if not self._tasks:
            return {}
        early = sum(at <= sampled_at for at in self._ended.values()) / len(self._tasks)
        return {
            "reward/scored_while_sampling": Metric(early, weight=len(self._tasks)),
            "timing_s/reward_after_sampling": Metric(waited, "max"),
        }

    def cancel(self) -> None:
        """Give up what is left."""
        for task in self._tasks.values():
            task.cancel()

    async def _one(self, number: int, output: AgentLoopOutput) -> Any:
        batch = to_batch([output], self._pad, with_log_probs=False)
        columns = {name: array_of_objects([value]) for name, value in self._rows[number].items()}
        batch.non_tensor_batch = {**columns, **batch.non_tensor_batch}
        start = time.perf_counter()
        try:
            return await self._score(batch)
        except Exception as error:  # boundary: reported with the row; the sampling of the others is stopped by it
            raise RolloutError(f"row {number} of the batch cannot be scored: {error}") from error
        finally:
            self._ended[number] = time.perf_counter()
            output.metrics.compute_score += self._ended[number] - start
