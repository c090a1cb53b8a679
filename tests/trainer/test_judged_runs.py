"""A run whose answers are judged by a language model on a server, through a reward function that is a coroutine."""

from __future__ import annotations

import pytest

from tests.harness.judges import PATH, longest, reply, shown
from tests.harness.runs import prepare, train
from tests.harness.servers import serving
from verl.errors import RewardError

JUDGED = """
import functools
from verl.rewards.judges import JudgeClient, compare

judge = functools.cache(JudgeClient)

async def compute_score(data_source, solution_str, ground_truth, reward_router_address=None, budget=None):
    client = judge(reward_router_address, budget_calls=budget)
    return await compare(client, "Write something long.", solution_str, "0123456", both_orders=True)
"""
SERVED = ("reward.reward_model.enable=true", "reward.reward_model.rollout.name=server")
VALIDATED = ("data.val_files=train.parquet", "trainer.test_freq=1", "reward.while_sampling=true")


def at(server, prefix: str = "") -> str:
    return f"reward.reward_model.rollout.server.url={server.url}{prefix}"


@pytest.fixture
def here(workplace):
    prepare(JUDGED)
    return workplace


def test_a_judge_gives_the_rewards_and_its_columns_are_logged(here):
    with serving({f"/p{PATH}": longest}) as server:
        seen = train(*SERVED, *VALIDATED, at(server, "/p"))
        judged = {shown(payload, side) for payload in server.payloads(f"/p{PATH}") for side in ("first", "second")}
    (batch,), (metrics,) = seen.batches, seen.metrics
    scores, columns = batch.tensors["token_level_scores"].sum(-1).tolist(), batch.non_tensor_batch
    gaps = columns["judge_length_gap"].tolist()
    assert scores == [1.0 if gap > 0 else 0.5 if gap == 0 else 0.0 for gap in gaps] and len(set(scores)) > 1
    assert "0123456" in judged and len(judged) > 4
    assert metrics["reward/unscorable"] == 0 and metrics["reward/scored_while_sampling"] >= 0
    (share,) = [value for name, value in metrics.items() if "judge_first_share/mean" in name]
    assert share == 0.5, "each answer is judged in both orders"
    assert any("judge_calls/mean" in name for name in metrics) and any(
        "judge_length_gap/mean" in name for name in metrics
    )


def test_samples_of_a_judge_that_writes_prose_score_zero(here):
    def moody(payload):
        return longest(payload) if len(shown(payload, "first") + shown(payload, "second")) % 2 else reply("Both!")

    with serving({PATH: moody}) as server:
        seen = train(*SERVED, at(server))
    (batch,), (metrics,) = seen.batches, seen.metrics
    gaps, columns = batch.non_tensor_batch["judge_length_gap"].tolist(), batch.non_tensor_batch
    unread = [float(gap % 2 == 0) for gap in gaps]  # 7 characters of the rival and 7 + gap together
    scores = batch.tensors["token_level_scores"].sum(-1).tolist()
    assert scores == [float(gap > 0 and not none) for gap, none in zip(gaps, unread, strict=True)]
    assert columns["judge_no_verdict"].tolist() == unread and 0 < sum(unread) < len(batch)
    assert metrics["reward/judge_no_verdict"] == sum(unread) and metrics["reward/unscorable"] == 0
    assert not columns["unscorable"].any() and (batch.tensors["response_mask"].sum(-1) > 0).all()


def test_a_run_ends_with_the_budget_of_its_judge(here):
    with serving({PATH: longest}) as server, pytest.raises(RewardError, match="budget is used up: 3 of 3"):
        train(*SERVED, at(server), "+reward.custom_reward_function.reward_kwargs.budget=3", "reward.on_error=raise")
    assert server.count(PATH) <= 3
