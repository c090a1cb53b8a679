"""Managers that score one row at a time with ``async run_single``, the form in which newer user code is written."""

from __future__ import annotations

import asyncio
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from verl.protocol import DataProto
from verl.protocol.tokenizer import Tokenizer
from verl.rewards.dispatch import default_compute_score
from verl.rewards.failures import failure_metrics, report_failures
from verl.rewards.invoke import raised, result_of
from verl.rewards.managers.base import gather_extra, given_scores
from verl.rewards.managers.rows import is_scored, known_results, last_sampled, tensor
from verl.rewards.runners import LoopRunner
from verl.rewards.samples import RewardResult, RewardSample, zeroed
from verl.rewards.scoring import SAMPLE_TIMEOUT, ScoringLimits


class RewardManagerBase(ABC):
    """Subclass it and write ``run_single``; all rows of a batch run at once, each with the time limit.

    Example:
        >>> class Mine(RewardManagerBase):
        ...     async def run_single(self, data):
        ...         return {"reward_score": 1.0, "reward_extra_info": {"acc": True}}
    """

    _ready = False

    def __init__(
        self,
        config: Any,
        tokenizer: Tokenizer,
        compute_score: Callable[..., Any] | None = None,
        reward_router_address: str | None = None,
        reward_model_tokenizer: Any = None,
    ):
        self.config, self.tokenizer = config, tokenizer
        self.compute_score = compute_score or default_compute_score
        self.reward_router_address, self.reward_model_tokenizer = reward_router_address, reward_model_tokenizer
        self.configure(ScoringLimits())
        type(self).init_class(config, tokenizer)

    @classmethod
    def init_class(cls, config: Any, tokenizer: Tokenizer) -> None:
        """Set up once per process what all instances share; called by every instance, so check whether it is done."""
        cls._ready = True

    @abstractmethod
    async def run_single(self, data: DataProto) -> dict[str, Any]:
        """Score a batch of one row; ``{"reward_score": float, "reward_extra_info": dict}``."""

    @classmethod
    def assemble_rm_scores(cls, data: DataProto, scores: Sequence[float | None]) -> torch.Tensor:
        """Scores (B, T) float32, each on the last sampled token of its row; None and empty responses write nothing."""
        written = torch.zeros(tensor(data, "responses").shape, dtype=torch.float32)
        for i, (place, score) in enumerate(zip(last_sampled(data), scores, strict=True)):
            if place is not None and score is not None:
                written[i, place] = score
        return written

    def configure(self, limits: ScoringLimits) -> None:
        """Set time limit, rate limit and what a failure does."""
        self.limits = limits
        score_row = weakref.WeakMethod(self._score_row)  # the loop must not keep the manager alive

        async def work(data: DataProto) -> list[RewardResult]:
            method = score_row()
            assert method is not None
            return await method(data)

        self._runner = LoopRunner(work, limits.timeout or SAMPLE_TIMEOUT, limits.gate)

    def __call__(self, data: DataProto, return_dict: bool = True) -> torch.Tensor | dict[str, Any]:
        """Score a batch; the same contract as the other managers."""
        if is_scored(data):
            scores_given = given_scores(data)
            return scores_given if return_dict else scores_given["reward_tensor"]
        early = known_results(data)
        waiting = [None if early[i] else self._submit(data[i : i + 1]) for i in range(len(data))]
        results = [result or future.result()[0] for result, future in zip(early, waiting, strict=True)]  # type: ignore[union-attr]
        if self.limits.on_error == "zero":
            results = list(map(zeroed, results))
        sources = data.non_tensor_batch.get("data_source", [None] * len(data))
        samples = [RewardSample(sources[i], "", None, None, i) for i in range(len(data))]
        report_failures(samples, results, f"{type(self).__name__}.run_single", self.limits.on_error)
        scores = self.assemble_rm_scores(data, [result.score for result in results])
        if not return_dict:
            return scores
        return {
            "reward_tensor": scores,
            "reward_extra_info": gather_extra(results),
            "unscorable": [result.failure is not None for result in results],
            "metrics": failure_metrics(results),
        }

    def _submit(self, row: DataProto) -> Future[list[RewardResult]]:
        return self._runner.submit(row)  # type: ignore[arg-type]

    async def result_of_row(self, data: DataProto) -> RewardResult:
        """What ``run_single`` says of a batch of one row, while others are being sampled (`verl.rewards.early`)."""
        return (await asyncio.wrap_future(self._runner.submit(data)))[0]  # type: ignore[arg-type]

    def close(self) -> None:
        """Stop the event loop of ``run_single``."""
        self._runner.close()

    async def _score_row(self, data: DataProto) -> list[RewardResult]:
        try:
            raw = await self.run_single(data)
            extra = raw.get("reward_extra_info") or {}
            result = result_of(raw.get("reward_score"))
            return [result if result.failure else RewardResult(result.score, dict(extra))]
        except Exception as error:  # boundary: the user's code
            return [RewardResult(failure=raised(error))]
