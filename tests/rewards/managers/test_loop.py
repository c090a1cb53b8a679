"""Managers with ``async run_single`` score all rows at once and keep the same contract."""

from __future__ import annotations

import asyncio
from typing import ClassVar

import pytest
import torch

from tests.rewards.files import Letters, batch
from verl.errors import RewardError
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase
from verl.rewards import ScoringLimits


class Mine(RewardManagerBase):
    prepared = 0
    good = 0
    ended: ClassVar[list[str]] = []

    @classmethod
    def init_class(cls, config, tokenizer):
        cls.prepared += 1

    async def run_single(self, data):
        assert len(data) == 1
        truth = data[0].non_tensor_batch["reward_model"]["ground_truth"]
        if truth == "raise":
            raise ValueError("bad row")
        if truth == "none":
            return {"reward_score": None}
        if truth == "hang":
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                Mine.ended.append("cancelled")
                raise
        Mine.good += 1
        while Mine.good < 3:  # one after the other would wait for ever
            await asyncio.sleep(0.01)
        return {"reward_score": float(truth), "reward_extra_info": {"acc": truth == "1"}}


def test_rows_are_scored_at_once_and_failures_are_masked():
    manager = Mine(None, Letters())
    manager.configure(ScoringLimits(timeout=3.0))
    found = manager(batch(["a", "bb", "c", "", "d", "e"], ["1", "0.5", "raise", "1", "hang", "none"]))
    assert found["reward_tensor"].tolist() == [[0, 1, 0], [0, 0, 0.5], [0] * 3, [0] * 3, [0] * 3, [0] * 3]
    assert found["unscorable"] == [False, False, True, False, True, True]
    assert found["reward_extra_info"]["acc"] == [True, False, None, True, None, None]
    assert found["metrics"]["reward/unscorable"].value == 3
    assert Mine.prepared == 1 and Mine.ended == ["cancelled"], "the row that hangs was given up"


def test_all_failed_stops_and_given_scores_are_used():
    manager = Mine(None, Letters())
    with pytest.raises(RewardError, match=r"Mine\.run_single.*bad row"):
        manager(batch(["a"], ["raise"]))
    data = batch(["a"], ["raise"])
    data.batch["rm_scores"] = torch.tensor([[0.0, 2.0]])
    assert manager(data, return_dict=False).tolist() == [[0.0, 2.0]]


def test_scores_are_assembled_on_the_last_sampled_token():
    data = batch(["abc", "a", ""], ["x"] * 3)
    assert RewardManagerBase.assemble_rm_scores(data, [1.0, 2.0, 3.0]).tolist() == [
        [0, 0, 0, 1.0],
        [0, 2.0, 0, 0],
        [0, 0, 0, 0],
    ]
