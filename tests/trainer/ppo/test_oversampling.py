"""`data.oversample_factor`: more prompts are sampled than trained on, and those in the middle come first."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.harness.runs import prepare, train
from tests.trainer.ppo.test_dynamic_sampling import GROUPS, PATTERNS, rows
from verl.config import PPOTrainerConfig, replace
from verl.protocol import DataProto
from verl.trainer.ppo.context import RunState
from verl.trainer.ppo.group_filter import chosen_rows


def chosen(rates: dict[str, list[float]], finish: list[str] | None = None, **data: object) -> tuple[list[str], dict]:
    """The uids of the rows that are kept, of prompts whose samples were right that often, and the metrics."""
    config = replace(PPOTrainerConfig(), **{f"data.{name}": value for name, value in data.items()})
    uids = [uid for uid, accs in rates.items() for _ in accs]
    columns = {
        "uid": np.array(uids, dtype=object),
        "acc": np.array([acc for accs in rates.values() for acc in accs], dtype=object),
        "finish_reason": np.array(finish or ["stop"] * len(uids), dtype=object),
        "unscorable": np.array([acc is None for accs in rates.values() for acc in accs]),
    }
    samples = DataProto.from_dict({"token_level_scores": torch.zeros(len(uids), 1)}, columns)
    ctx = RunState(config, reward=dict, total_steps=1).open(1)
    rows = chosen_rows(samples, config.data.train_batch_size, ctx)
    return list(samples.non_tensor_batch["uid"][rows]), ctx.metrics.values()


def test_prompts_of_middling_difficulty_are_trained_on_and_the_earliest_others_fill_the_batch(workplace):
    """Rates 1, 1/4, 0, 3/4, 1/4, 1, 3/4, 0: five prompts of eight have room for four that are liked and the first."""
    prepare(PATTERNS, rows(GROUPS))
    seen = train("data.train_batch_size=5", "data.oversample_factor=1.6", "data.filter_accuracy=true",
                 "data.shuffle=false", "actor_rollout_ref.actor.ppo_mini_batch_size=5")  # fmt: skip
    (batch,), (metrics,) = seen.batches, seen.metrics
    assert [row["index"] for row in batch.non_tensor_batch["extra_info"]] == [0] * 4 + [1] * 4 + [3] * 4 + [4] * 4 + [
        6
    ] * 4
    assert metrics["training/oversampling/liked_prompts"] == 4
    assert metrics["training/oversampling/filled_prompts"] == 1
    assert not len(seen.trainer.schedule.stream.queue), "what is not chosen is dropped"
    assert seen.trainer.steps_per_epoch == 1
    account = seen.trainer.state.ledger.account
    assert (account.sampled, account.trained, dict(account.dropped)) == (32, 20, {"surplus": 12})


def test_the_bounds_count_themselves_and_unscored_samples_do_not():
    rates = {"z": [1, 1, 1], "c": [1, 0, None], "b": [0.2, 0.2, 0.2], "a": [None] * 3, "d": [0.8, 0.8, 0.8]}
    settings = {"oversample_factor": 5 / 3, "train_batch_size": 3, "filter_accuracy": True}
    assert set(chosen(rates, **settings)[0]) == {"c", "b", "d"}
    narrow, metrics = chosen(rates, **settings, accuracy_lower_bound=0.4, accuracy_upper_bound=0.6)
    assert narrow == ["z"] * 3 + ["c"] * 3 + ["b"] * 3, "c is liked, and the two earliest others fill up"
    assert metrics["training/oversampling/filled_prompts"] == 2


@pytest.mark.parametrize(("filter_truncate", "kept"), [(True, ["b", "b"]), (False, ["a", "a"])])
def test_a_prompt_with_an_answer_that_was_cut_off_comes_last(filter_truncate, kept):
    finish = ["stop", "length", "stop", "stop"]
    found, _ = chosen(
        {"a": [1, 0], "b": [1, 1]}, finish, oversample_factor=2.0, train_batch_size=1, filter_truncate=filter_truncate
    )
    assert found == kept
