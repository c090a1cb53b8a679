"""Dynamic sampling and ReMax's baseline in whole runs: what is sampled, what is kept, what is compared with what."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.harness.runs import prepare, train
from verl.errors import ConfigError, DataError

# Sample k of a prompt is right if letter k of its ground truth is 1. `acc` decides what is kept, the score is something
# else; every call is written down.
PATTERNS = """from collections import Counter

seen = Counter()


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    k = seen[extra_info["index"]] % len(ground_truth)
    seen[extra_info["index"]] += 1
    with open("calls.txt", "a") as file:
        print(extra_info["index"], k, repr(solution_str), file=file)
    return {"score": k / 10 + extra_info["index"], "acc": float(ground_truth[k]), "text": "a"}
"""
# ALGORITHMS D.3: the first four groups are of generation 1, the others of generation 2
GROUPS = ["1111", "0100", "0000", "1011", "0001", "1111", "0111", "0000"]
FILTER = (
    "algorithm.filter_groups.enable=true",
    "algorithm.filter_groups.metric=acc",
    "data.shuffle=false",
    "data.train_batch_size=3",
    "data.gen_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=3",
)


def rows(patterns: list[str]) -> list[dict]:
    return [
        {
            "data_source": "test",
            "prompt": [{"role": "user", "content": f"{i}?"}],
            "reward_model": {"style": "rule", "ground_truth": pattern},
            "extra_info": {"index": i},
        }
        for i, pattern in enumerate(patterns)
    ]


@pytest.fixture
def here(workplace):
    prepare(PATTERNS, rows(GROUPS))


def calls() -> list[str]:
    return Path("calls.txt").read_text().splitlines()


def test_groups_without_a_difference_are_replaced_until_the_batch_is_full(here):
    seen = train(*FILTER)
    batch, metrics = seen.batches[0], seen.metrics[0]
    assert [row["index"] for row in batch.non_tensor_batch["extra_info"]] == [1] * 4 + [3] * 4 + [4] * 4
    assert len(calls()) == 2 * 4 * 4, "two generations of four prompts with four samples"
    assert metrics["training/num_gen_batches"] == 2
    assert metrics["training/filter_groups/dropped_groups"] == 4
    assert metrics["training/filter_groups/evicted_samples"] == 16
    assert metrics["training/filter_groups/carried_samples"] == 4, "the group 0111 waits for the next step"
    assert metrics["training/zero_variance_groups"] == 0.5
    assert metrics["training/zero_advantage_groups"] == 0
    (held,) = seen.trainer.schedule.stream.held_samples()
    assert held.non_tensor_batch["extra_info"][0]["index"] == 6


def test_several_batches_of_prompts_in_flight_are_sampled_as_one_and_keep_the_same_groups(here):
    seen = train(*FILTER, "algorithm.filter_groups.max_inflight_gen_batches=3")
    batch, metrics = seen.batches[0], seen.metrics[0]
    # generation 1 holds three batches: both of this epoch, and the first of the next one
    assert [row["index"] for row in batch.non_tensor_batch["extra_info"]] == [1] * 4 + [3] * 4 + [4] * 4
    assert len(calls()) == 3 * 16 and metrics["training/num_gen_batches"] == 3
    assert metrics["training/filter_groups/carried_samples"] == 3 * 4, "the groups 6, 1 and 3 wait"


def test_no_more_batches_are_in_flight_than_the_limit_of_a_step_allows(here):
    two = ("algorithm.filter_groups.max_inflight_gen_batches=8", "algorithm.filter_groups.max_num_gen_batches=2")
    seen = train(*FILTER, *two)
    assert seen.metrics[0]["training/num_gen_batches"] == 2 and len(calls()) == 2 * 16
    with pytest.raises(ConfigError, match="max_inflight_gen_batches"):
        train(*FILTER, "algorithm.filter_groups.max_inflight_gen_batches=0")


def test_what_is_left_over_opens_the_next_batch(here):
    seen = train(*FILTER, "trainer.total_training_steps=2")
    # step 2: group 6 waits; generation 3 (epoch 2, the same four prompts) keeps 1 and 3
    indices = [row["index"] for row in seen.batches[1].non_tensor_batch["extra_info"]]
    assert indices == [6] * 4 + [1] * 4 + [3] * 4
    assert seen.metrics[1]["training/num_gen_batches"] == 1
    account = seen.trainer.state.ledger.account  # the run's end has checked it
    assert (account.sampled, account.trained, len(account.open)) == (3 * 16, 2 * 12, 0)
    assert dict(account.dropped) == {"filtered_group": 3 * 8}
    assert len(calls()) == 3 * 16


def test_a_limit_on_generations_stops_the_run_and_says_what_was_kept(here):
    with pytest.raises(
        DataError, match=r"max_num_gen_batches.*1 batches of prompts were sampled, only 8 of 12 samples"
    ):
        train(*FILTER, "algorithm.filter_groups.max_num_gen_batches=1")
    assert len(calls()) == 16


def test_without_filtering_groups_without_a_difference_are_counted(here):
    seen = train("data.shuffle=false", "reward.reward_manager.name=dapo")
    assert len(calls()) == 16
    assert seen.metrics[0]["training/num_gen_batches"] == 1
    assert seen.metrics[0]["training/zero_variance_groups"] == 0, "scores differ inside each group"


@pytest.mark.parametrize(
    ("metric", "says"),
    [
        ("accs", r"returned no such key. Got 'accs'. Allowed: null for the reward, acc, score. Did you mean 'acc'"),
        ("text", r"groups are filtered by numbers, and 'text' is 'a'"),
    ],
)
def test_a_metric_that_the_scorer_does_not_return_is_refused(here, metric, says):
    with pytest.raises(DataError, match=says):
        train(*FILTER, f"algorithm.filter_groups.metric={metric}")


def test_a_filter_on_the_reward_after_the_kl_is_refused(here):
    with pytest.raises(ConfigError, match="seq_reward, the score before the KL"):
        train(*FILTER, "algorithm.filter_groups.metric=seq_final_reward", "algorithm.use_kl_in_reward=true")


# The score of an answer is its number of different letters, so that it can be computed again from the answer.
LETTERS = """def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    with open("calls.txt", "a") as file:
        print(extra_info["index"], file=file)
    if FAILS and extra_info["index"] == 2 and sum(1 for line in open("calls.txt") if line == "2\\n") == 5:
        raise RuntimeError("no score")
    return float(len(set(solution_str)))
"""


@pytest.fixture
def letters(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def make(fails: bool) -> None:
        prepare(LETTERS.replace("FAILS", str(fails)), rows(["x"] * 4))

    return make


def greedy(trainer, batch) -> list[float]:
    """Scores of greedy answers, sampled again with the weights before the update (the run leaves them unchanged)."""
    first = batch.select_idxs(range(0, len(batch), 4))
    prompts = first.select(batch_keys=[], non_tensor_batch_keys=["uid", "raw_prompt", "raw_prompt_ids"])
    prompts.meta_info = {"do_sample": False}
    made = trainer.roles["rollout"].group.generate_sequences(prompts)
    texts = trainer.tokenizer.batch_decode(made.batch["responses"], skip_special_tokens=True)
    return [float(len(set(text))) for text in texts]


REMAX = ("algorithm.adv_estimator=remax", "data.shuffle=false", "actor_rollout_ref.actor.optim.lr=0")


def test_remax_compares_with_one_greedy_answer_per_prompt(letters):
    letters(fails=False)
    seen = train(*REMAX)
    batch, metrics = seen.batches[0], seen.metrics[0]
    assert len(calls()) == 16 + 4, "four samples and one greedy answer for each of four prompts"
    baselines = greedy(seen.trainer, batch)
    assert batch.batch["reward_baselines"].tolist() == pytest.approx(np.repeat(baselines, 4).tolist())
    assert metrics["critic/reward_baselines/mean"] == pytest.approx(np.mean(baselines))
    scores, mask = batch.batch["token_level_scores"].sum(-1), batch.batch["response_mask"]
    expected = (scores - batch.batch["reward_baselines"])[:, None] * mask
    torch.testing.assert_close(batch.batch["advantages"], expected)
    assert metrics["actor/pg_loss"] == pytest.approx(-(expected.sum() / mask.sum()).item(), abs=1e-5)
    assert "gen_max" in seen.trainer.ctx.timers.seconds


def test_samples_without_a_baseline_are_left_out(letters):
    letters(fails=True)  # the fifth answer to prompt 2 is its greedy one
    batch = train(*REMAX).batches[0]
    lost = np.array([row["index"] == 2 for row in batch.non_tensor_batch["extra_info"]])
    assert batch.non_tensor_batch["unscorable"].tolist() == lost.tolist()
    assert batch.batch["response_mask"][torch.from_numpy(lost)].sum() == 0
    assert batch.batch["response_mask"][torch.from_numpy(~lost)].sum(-1).min() > 0
    assert batch.batch["advantages"][torch.from_numpy(lost)].abs().sum() == 0


def test_a_long_answer_costs_what_the_overlong_buffer_says(letters):
    letters(fails=False)
    seen = train(
        "data.shuffle=false",
        "reward.reward_manager.name=dapo",
        "+reward.reward_kwargs.overlong_buffer_cfg.enable=true",
        "+reward.reward_kwargs.overlong_buffer_cfg.len=4",
        "+reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=0.5",
        "+reward.reward_kwargs.overlong_buffer_cfg.log=true",
        "+reward.reward_kwargs.max_resp_len=8",
    )
    batch = seen.batches[0]
    lengths = batch.batch["response_mask"].sum(-1)
    penalty = torch.minimum(-(lengths - 4) / 4 * 0.5, torch.tensor(0.0))  # 8 tokens at most, the last 4 cost up to 0.5
    accuracy = torch.tensor(batch.non_tensor_batch["acc"].astype(float), dtype=torch.float32)
    torch.testing.assert_close(batch.batch["token_level_scores"].sum(-1), accuracy + penalty)
    assert penalty.min() == -0.5


def test_a_resumed_run_takes_up_what_was_left_over(letters):
    letters(fails=False)
    changes = [word for word in FILTER if "metric" not in word]
    changes += ["trainer.save_freq=1", "trainer.resume_mode=auto", "actor_rollout_ref.actor.optim.lr=1e-2"]
    whole = train(*changes, "trainer.total_training_steps=2", "trainer.default_local_dir=whole")
    train(*changes, "trainer.total_training_steps=1", "trainer.default_local_dir=halves")
    rest = train(*changes, "trainer.total_training_steps=2", "trainer.default_local_dir=halves")
    assert whole.metrics[0]["training/filter_groups/carried_samples"] > 0
    (second,) = rest.batches
    for name, tensor in whole.batches[1].batch.items():
        assert torch.equal(second.batch[name], tensor), name
    assert second.non_tensor_batch["uid"].tolist() == whole.batches[1].non_tensor_batch["uid"].tolist()
    assert rest.metrics[0]["actor/grad_norm"] == whole.metrics[1]["actor/grad_norm"]
