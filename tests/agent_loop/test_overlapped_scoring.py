"""Scoring beside sampling: it really happens at the same time, and the numbers are those of scoring afterwards."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
import torch

from tests.agent_loop.server.scripted import TOKENIZER, Scripted, ids, rows, settings
from verl.agent_loop import AgentLoopManager
from verl.errors import RewardError, RolloutError
from verl.metrics import notices
from verl.protocol import DataProto
from verl.rewards import ScoringLimits, load_reward_function
from verl.rewards.early import EarlyScorer
from verl.rewards.managers.batch import BatchRewardManager
from verl.rewards.managers.dapo import DAPORewardManager
from verl.rewards.managers.loop import RewardManagerBase
from verl.rewards.managers.naive import NaiveRewardManager
from verl.rewards.managers.rows import EARLY

WORDS = ("one", "three", "eleven", "x")


def batch_of(count=4):
    truth = [{"ground_truth": "x"}] * count
    info = [{"index": i} for i in range(count)]
    return rows(count, reward_model=truth, extra_info=info, data_source=["mine"] * count)


def sample(reward, sampler=None, early=True):
    """(sampled batch, what the manager makes of it)."""
    score_row = EarlyScorer.of(reward).score if early else None
    loops = AgentLoopManager(settings(), sampler or Scripted(*WORDS), TOKENIZER, score_row=score_row)
    prompts = batch_of()
    made = prompts.union(loops.generate_sequences(prompts))
    return made, reward(made)


def by_length(solution_str, ground_truth, extra_info):
    if solution_str == "eleven":
        raise ValueError("too long for me")
    return {"score": len(solution_str) / 3 + extra_info["num_turns"], "acc": solution_str == ground_truth}


async def by_length_async(solution_str, ground_truth, extra_info):
    await asyncio.sleep(0)
    return by_length(solution_str, ground_truth, extra_info)


class Single(RewardManagerBase):
    async def run_single(self, data):
        length = int(data.batch["response_mask"].sum())
        return {"reward_score": length / 7, "reward_extra_info": {"length": length}}


@pytest.mark.parametrize("function", [by_length, by_length_async, "file"], ids=["thread", "async", "process"])
@pytest.mark.parametrize("kind", [NaiveRewardManager, DAPORewardManager])
def test_early_results_are_the_same_bits_as_late_ones(function, kind, tmp_path):
    if function == "file":
        file = tmp_path / "mine.py"
        file.write_text(
            "def compute_score(solution_str, ground_truth, extra_info):\n"
            "    if solution_str == 'eleven':\n        raise ValueError('too long for me')\n"
            "    score = len(solution_str) / 3 + extra_info['num_turns']\n"
            "    return {'score': score, 'acc': solution_str == ground_truth}\n"
        )
        function = load_reward_function(str(file))
    options = {}
    if kind is DAPORewardManager:
        buffer = {"enable": True, "len": 4, "penalty_factor": 0.7, "log": True}
        options = {"max_resp_len": 6, "overlong_buffer_cfg": buffer}
    (early, one), (late, other) = (
        sample(kind(TOKENIZER, 0, function, **options), early=early) for early in (True, False)
    )
    assert torch.equal(one["reward_tensor"], other["reward_tensor"])
    assert one["reward_extra_info"] == other["reward_extra_info"]
    assert one["unscorable"] == other["unscorable"] == [False, False, True, False]
    assert one["metrics"] == other["metrics"]
    assert EARLY in early.non_tensor_batch and EARLY not in late.non_tensor_batch
    assert torch.equal(early.batch["responses"], late.batch["responses"])


def test_a_manager_with_run_single_scores_early_too():
    (_, one), (_, other) = (sample(Single(None, TOKENIZER), early=early) for early in (True, False))
    assert torch.equal(one["reward_tensor"], other["reward_tensor"]) and one["reward_tensor"].sum() > 0
    assert one["reward_extra_info"] == other["reward_extra_info"]


def test_a_row_is_scored_while_another_is_still_being_sampled():
    scored = threading.Event()

    class WaitsForTheScore(Scripted):
        """The second request is answered only once the result of the first row is there."""

        async def generate(self, request):
            if request.uid == "u1":
                assert await asyncio.to_thread(scored.wait, 60), "nothing was scored beside sampling"
            return await super().generate(request)

    reward = NaiveRewardManager(TOKENIZER, 0, lambda solution_str, ground_truth: 1.0)

    async def score_row(row):
        result = await EarlyScorer.of(reward).score(row)
        scored.set()
        return result

    loops = AgentLoopManager(settings(), WaitsForTheScore(*WORDS), TOKENIZER, score_row=score_row)
    prompts = batch_of()
    made = prompts.union(loops.generate_sequences(prompts))
    assert reward(made)["reward_tensor"].sum() == 4
    share = made.meta_info["metrics"]["reward/scored_while_sampling"].value
    assert share >= 0.25, "at least the row that the other one waited for"
    assert made.meta_info["metrics"]["timing_s/reward_after_sampling"].value >= 0


def test_sampling_goes_on_while_a_row_is_being_scored():
    sampled = threading.Event()

    class Tells(Scripted):
        async def generate(self, request):
            done = await super().generate(request)
            if not self.script:
                sampled.set()
            return done

    def score(solution_str, ground_truth):
        assert sampled.wait(60), "the scorer holds up sampling"
        return 1.0

    _, found = sample(NaiveRewardManager(TOKENIZER, 0, score, limits=ScoringLimits(num_workers=1)), Tells(*WORDS))
    assert found["unscorable"] == [False] * 4


def test_all_results_come_from_before_and_nothing_is_scored_twice():
    calls = []

    def score(solution_str, ground_truth):
        calls.append(solution_str)
        return 1.0

    sample(NaiveRewardManager(TOKENIZER, 0, score))
    assert sorted(calls) == sorted(WORDS)


def test_a_function_of_the_whole_batch_is_scored_afterwards_and_says_so():

    def score(solution_strs, ground_truths):
        return [1.0] * len(solution_strs)

    assert EarlyScorer.of(BatchRewardManager(TOKENIZER, 0, score)) is None
    assert "scored after sampling" in notices()["reward.while_sampling"]


def test_failures_of_all_rows_and_on_error_stop_the_run_as_they_do_afterwards():
    def score(solution_str, ground_truth):
        raise ValueError("never")

    for early in (True, False):
        with pytest.raises(RewardError, match=r"all 4 samples of a batch failed.*row 0.*never"):
            sample(NaiveRewardManager(TOKENIZER, 0, score), early=early)


def test_a_row_that_cannot_be_given_to_its_scorer_ends_the_batch_with_its_number():
    async def score_row(data):
        raise ValueError("no such column")

    loops = AgentLoopManager(settings(), Scripted(*WORDS), TOKENIZER, score_row=score_row)
    with pytest.raises(RolloutError, match=r"row \d of the batch cannot be scored: no such column"):
        loops.generate_sequences(batch_of())


def test_rows_that_their_loop_has_scored_keep_that_score_beside_rows_that_are_scored():
    ones = torch.ones(2, 2, dtype=torch.int64)
    tensors = {"responses": torch.tensor([ids("ab"), ids("cd")]), "response_mask": ones, "attention_mask": ones}
    data = DataProto.from_dict(tensors=tensors, non_tensors=batch_of(2).non_tensor_batch)
    data.non_tensor_batch["reward_score"] = np.array([0.25, None], dtype=object)
    found = NaiveRewardManager(TOKENIZER, 0, lambda solution_str, ground_truth: 7.0)(data)
    assert found["reward_tensor"].tolist() == [[0.0, 0.25], [0.0, 7.0]]
