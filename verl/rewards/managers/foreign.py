"""Managers that know only the older contract (a tensor, or a dict without failures) behind that of this library."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from verl.errors import RewardError
from verl.protocol import DataProto
from verl.rewards.failures import failure_metrics, report_failures
from verl.rewards.invoke import LARGEST
from verl.rewards.managers.base import RewardManager, given_scores
from verl.rewards.managers.loop import RewardManagerBase
from verl.rewards.managers.rows import is_scored, tensor
from verl.rewards.samples import RewardFailure, RewardResult, RewardSample, zeroed
from verl.rewards.scoring import ScoringLimits


class ForeignManager:
    """A user's manager; rows whose scores are not finite are masked and counted, the form of the result is checked."""

    def __init__(self, manager: Callable[..., Any], limits: ScoringLimits):
        self.manager, self.limits = manager, limits
        self._takes_return_dict = "return_dict" in inspect.signature(manager).parameters

    @property
    def label(self) -> str:
        """The class of the user's manager."""
        return type(self.manager).__name__

    def __call__(self, data: DataProto, return_dict: bool = True) -> torch.Tensor | dict[str, Any]:
        if is_scored(data):
            scored = given_scores(data)
            return scored if return_dict else scored["reward_tensor"]
        with self.limits.gate.passed():
            raw = self.manager(data, return_dict=True) if self._takes_return_dict else self.manager(data)
        scored = dict(raw) if isinstance(raw, dict) else {"reward_tensor": raw}
        scores = scored.get("reward_tensor")
        shape = tuple(tensor(data, "responses").shape)
        if not isinstance(scores, torch.Tensor) or tuple(scores.shape) != shape:
            got = tuple(scores.shape) if isinstance(scores, torch.Tensor) else type(scores).__name__
            raise RewardError(
                f"{self.label} did not return token-level scores", got=got, allowed=f"a tensor of shape {shape}"
            )
        scores = scores.float()
        finite = (scores.abs() <= LARGEST).all(-1).tolist()
        marked = scored.get("unscorable", [False] * len(finite))
        results = [_result(good, mark) for good, mark in zip(finite, marked, strict=True)]
        sources = data.non_tensor_batch.get("data_source", [None] * len(results))
        samples = [RewardSample(sources[i], "", None, None, i) for i in range(len(results))]
        failed = torch.tensor([result.failure is not None for result in results], dtype=torch.bool)
        scores = scores.masked_fill(failed[:, None], 0.0)
        if self.limits.on_error == "zero":
            results = list(map(zeroed, results))
        report_failures(samples, results, self.label, self.limits.on_error)
        unscorable = [result.failure is not None for result in results]
        if not return_dict:
            return scores
        extra = {name: list(values) for name, values in scored.get("reward_extra_info", {}).items()}
        return {
            "reward_tensor": scores,
            "reward_extra_info": extra,
            "unscorable": unscorable,
            "metrics": failure_metrics(results),
        }

    def close(self) -> None:
        return None


def adopt(manager: Any, limits: ScoringLimits) -> Any:
    """A manager of any kind as one that keeps the contract of this library."""
    if isinstance(manager, (RewardManager, RewardManagerBase)):
        manager.configure(limits)
        return manager
    return ForeignManager(manager, limits)


def _result(finite: bool, marked: Any) -> RewardResult:
    if finite and not marked:
        return RewardResult(0.0)
    return RewardResult(
        failure=RewardFailure("value", "it is marked unscorable" if finite else "its score is not finite, or too large")
    )
