"""Features of sampling together: what is sampled, what of it is trained on, and what a resumed run continues with."""

from __future__ import annotations

import shutil
from itertools import combinations

import numpy as np
import pytest
import torch

from tests.harness.configs import changed
from tests.harness.runs import COMMON, Seen, differing, prepare, train
from tests.trainer.ppo.test_dynamic_sampling import GROUPS, PATTERNS, REMAX, calls, greedy, letters, rows
from verl.config import load_config
from verl.errors import ConfigError
from verl.metrics import notices, reset_notices
from verl.trainer.ppo.context import RunState

MODE, FILTER = "trainer.v1.trainer_mode", "algorithm.filter_groups"
KEEPS = "actor_rollout_ref.rollout.keep_unfinished"
__all__ = ["letters"]
ORDERED = ("data.shuffle=false", "data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2")
PREFERS = ("data.filter_accuracy=true", "data.accuracy_lower_bound=0.5")
LEARNS = ("actor_rollout_ref.actor.optim.lr=1e-2",)
FILTERS = (f"{FILTER}.enable=true", f"{FILTER}.metric=acc")


@pytest.fixture
def patterns(workplace):
    """Eight prompts that are answered rightly at rates of 1, 1/4, 0, 3/4, 1/4, 1, 3/4 and 0."""
    prepare(PATTERNS, rows(GROUPS))


def prompts(seen: Seen, step: int = 0) -> list[int]:
    """The rows of the data that a step trained on."""
    indices = [row["index"] for row in seen.batches[step].non_tensor_batch["extra_info"]]
    return list(dict.fromkeys(indices))


@pytest.mark.usefixtures("patterns")
def test_candidates_are_what_the_filter_keeps_and_the_liked_are_trained_on():
    """Of each four prompts two are filtered: 1, 3 and 4 are the three candidates, 3 is liked and 1 is the earliest."""
    seen = train(*ORDERED, *PREFERS, *FILTERS, "data.oversample_factor=1.5", "data.gen_batch_size=4")
    metrics, account = seen.metrics[0], seen.trainer.state.ledger.account
    assert prompts(seen) == [1, 3] and metrics["training/num_gen_batches"] == 2
    assert metrics["training/oversampling/liked_prompts"] == metrics["training/oversampling/filled_prompts"] == 1
    assert metrics["training/filter_groups/carried_samples"] == 4, "6 is a candidate of the next step"
    assert dict(account.dropped) == {"filtered_group": 4 * 4, "surplus": 4}
    assert (account.sampled, account.trained, len(account.open)) == (8 * 4, 2 * 4, 4)


@pytest.mark.usefixtures("patterns")
def test_candidates_come_in_batches_of_the_loader_and_the_rest_waits():
    """Four candidates in batches of three: 0 to 5, of which 3 is liked and 0 the earliest; 4 and 5 wait."""
    seen = train(*ORDERED, *PREFERS, "data.oversample_factor=2", "data.gen_batch_size=3")
    assert prompts(seen) == [0, 3] and seen.metrics[0]["training/num_gen_batches"] == 2
    assert seen.trainer.steps_per_epoch == 1, "two batches of three hold one step's four candidates"
    assert seen.trainer.schedule.stream.queue.complete_groups == 2


@pytest.mark.usefixtures("patterns")
def test_a_queue_counts_candidates_and_a_chunk_trains_on_liked_ones():
    """Chunks of one group out of four candidates, half a step ahead: 12 candidates under version 0, then 8 each."""
    words = (f"{MODE}=fully_async", "async_training.staleness_threshold=0.5", "data.oversample_factor=4",
             "async_training.trigger_parameter_sync_step=2", "actor_rollout_ref.actor.ppo_mini_batch_size=1",
             "trainer.total_training_steps=2")  # fmt: skip
    seen = train(*ORDERED[:2], *words, *PREFERS)
    assert [prompts(seen, step) for step in range(2)] == [[3, 6]] * 2, "the liked one of 0 to 3, and that of 4 to 7"
    versions = [batch.tensors["token_versions"].amax(-1)[::4].tolist() for batch in seen.batches]
    assert versions == [[0, 0], [0, 1]]
    assert [step["count/total_generated_samples"] for step in seen.metrics] == [12 * 4, 16 * 4]
    assert [step["fully_async/staleness/mean"] for step in seen.metrics] == [0, 0.5]
    counts, account = seen.trainer.schedule.stream.queue.counts, seen.trainer.state.ledger.account
    assert counts == {"admitted": 16, "trained": 4, "passed_over": 12}
    assert (account.sampled, account.trained, dict(account.dropped)) == (64, 16, {"surplus": 48})


@pytest.mark.usefixtures("shared_here")
def test_a_queue_with_nothing_ahead_chooses_as_sync_does():
    words = ("data.oversample_factor=1.5", "data.filter_accuracy=true", "trainer.skip_old_log_prob=false",
             *LEARNS, "trainer.total_training_steps=3", "trainer.save_freq=3")  # fmt: skip
    train(*words, "trainer.default_local_dir=chosen_sync")
    still = ("trainer.v1.colocate_async.num_warmup_batches=0", "trainer.default_local_dir=chosen_still")
    train(*words, f"{MODE}=colocate_async", *still)
    assert not differing("chosen_sync/global_step_3/actor", "chosen_still/global_step_3/actor")


LEAVES = (
    "actor_rollout_ref.rollout.keep_unfinished=true",
    "actor_rollout_ref.rollout.over_sample_rate=0.5",
    "algorithm.rollout_correction.bypass_mode=true",
    "actor_rollout_ref.rollout.max_num_seqs=5",
)
"""Twice as many prompts in work as a step takes, five responses at once."""


@pytest.mark.usefixtures("shared_here")
def test_no_response_is_left_where_a_step_takes_all_prompts_in_work():
    words = (LEAVES[2], *LEARNS, "trainer.save_freq=2",
             "trainer.total_training_steps=2")  # fmt: skip
    train(*words, "trainer.default_local_dir=ends")
    reset_notices()
    seen = train(*words, "actor_rollout_ref.rollout.keep_unfinished=true", "trainer.default_local_dir=kept")
    assert "has no effect with actor_rollout_ref.rollout.over_sample_rate=0" in notices()[KEEPS]
    assert [step["rollout/partial/left"] for step in seen.metrics] == [0, 0]
    assert not differing("ends/global_step_2/actor", "kept/global_step_2/actor")


@pytest.mark.usefixtures("patterns")
def test_responses_continue_in_batches_that_are_sampled_ahead():
    """Steps 1 and 2 are sampled with version 0, step 3 with version 1, from what the batch before has left."""
    seen = train(
        *ORDERED,
        *LEAVES,
        f"{MODE}=one_step_off",
        *LEARNS,
        "trainer.total_training_steps=3",
    )
    tables = [batch.tensors["token_versions"] for batch in seen.batches]
    assert [int(table.max()) for table in tables] == [0, 0, 1]
    spans = [{version for version in row.tolist() if version >= 0} for row in tables[2]]
    assert {0, 1} in spans, "two versions drew a response"
    worst = [step["training/off_policy/trajectory_staleness_worst/max"] for step in seen.metrics]
    assert worst == [0, 1, 2], "the bound of one version would have dropped the third batch"
    left, resumed = ([step[f"rollout/partial/{name}"] for step in seen.metrics] for name in ("left", "resumed"))
    assert resumed == [0, *left[:2]] and left[0] > 0
    account = seen.trainer.state.ledger.account
    assert account.trained == 3 * 2 * 4 and not account.dropped and not account.faults


@pytest.mark.usefixtures("letters")
def test_every_complete_prompt_and_no_other_has_a_greedy_answer(letters):
    letters(fails=False)
    still = (*REMAX, *ORDERED[1:], *LEAVES)
    seen = train(*still)
    (batch,), queue = seen.batches, seen.trainer.schedule.stream.queue
    baselines = greedy(seen.trainer, batch)
    assert batch.tensors["reward_baselines"].tolist() == np.repeat(baselines, 4).tolist()
    complete = 2 + queue.complete_groups
    assert len(queue) > queue.complete_groups, "some are in work"
    assert len(calls()) - 2 == complete * (4 + 1) - 2, "four samples and one greedy answer each"


@pytest.mark.usefixtures("patterns")
@pytest.mark.parametrize(
    ("words", "in_work", "taken"),
    [
        ((f"{FILTER}.enable=true", f"{FILTER}.metric=score", f"{FILTER}.max_inflight_gen_batches=2"), 8, 2),
        (("data.oversample_factor=2", *PREFERS), 8, 4),
    ],
    ids=["two batches in flight", "two candidates each"],
)
def test_more_batches_or_candidates_put_more_prompts_in_work(words, in_work, taken):
    """Two prompts of a step; with half of what is in work left: four for each batch, or for two candidates each."""
    seen = train(*ORDERED, *LEAVES, *words)
    queue, account = seen.trainer.schedule.stream.queue, seen.trainer.state.ledger.account
    assert queue.counts["admitted"] == in_work == len(queue) + taken
    assert (account.trained, dict(account.dropped)) == (8, {"surplus": 8} if taken == 4 else {})


def test_in_a_queue_an_update_interrupts_the_responses_that_are_kept():
    reset_notices()
    config = load_config("ppo_trainer", changed(COMMON, f"{MODE}=colocate_async", f"{KEEPS}=true"))
    assert config.actor_rollout_ref.rollout.requests_at_update == "abort"
    assert "continue with the new weights" in notices()[KEEPS]
    reset_notices()
    waits = ("actor_rollout_ref.rollout.requests_at_update=wait", f"{KEEPS}=true")
    load_config("ppo_trainer", changed(COMMON, f"{MODE}=colocate_async", *waits))
    assert "waits for the responses in flight" in notices()[KEEPS]


FEATURES = {
    "dynamic sampling": (f"{FILTER}.enable=true", f"{FILTER}.max_inflight_gen_batches=2"),
    "batches of the loader": ("data.gen_batch_size=8",),
    "choice": ("data.oversample_factor=2",),
    "early stop": ("actor_rollout_ref.rollout.over_sample_rate=0.25",),
    "partial rollouts": (f"{KEEPS}=true",),
    "interrupted requests": ("actor_rollout_ref.rollout.requests_at_update=abort",),
    "greedy baselines": ("algorithm.adv_estimator=remax",),
    "files": ("skip.rollout.enable=true",),
    "one step off": (f"{MODE}=one_step_off",),
    "queue": (f"{MODE}=colocate_async",),
}


@pytest.mark.usefixtures("shared_here")
def test_three_pairs_of_features_are_refused_and_all_others_load():
    """Files are of the one batch of a step; an early stop is of the one batch of a call."""
    refused = []
    for one, other in combinations(FEATURES, 2):
        words = (*FEATURES[one], *FEATURES[other], "algorithm.rollout_correction.bypass_mode=true")
        if len({word.partition("=")[0] for word in words}) < len(words):
            continue  # two values of one setting
        try:
            RunState(load_config("ppo_trainer", changed(COMMON, *words)), reward=dict, total_steps=1)
        except ConfigError:
            refused.append((one, other))
    assert set(refused) == {("early stop", "queue"), ("partial rollouts", "files"), ("files", "queue")}


COMBINED = {
    "filter, choice": (*FILTERS, *PREFERS, "data.oversample_factor=1.5", "data.gen_batch_size=4"),
    "filter, choice, one step off": (
        *FILTERS, *PREFERS, "data.oversample_factor=1.5", "data.gen_batch_size=4", f"{MODE}=one_step_off",
    ),
    "unfinished, one step off": (*LEAVES, f"{MODE}=one_step_off"),
    "unfinished, greedy baselines": (*LEAVES, "algorithm.adv_estimator=remax"),
    "unfinished, filter, choice": (
        *LEAVES, *FILTERS, *PREFERS, "data.oversample_factor=1.5", f"{FILTER}.max_inflight_gen_batches=2",
    ),
    "unfinished, filter, choice, one step off": (
        *LEAVES, *FILTERS, *PREFERS, "data.oversample_factor=1.5", f"{MODE}=one_step_off",
    ),
    "choice, queue": (*PREFERS, "data.oversample_factor=2", f"{MODE}=colocate_async"),
}  # fmt: skip


@pytest.mark.usefixtures("patterns")
@pytest.mark.parametrize("words", COMBINED.values(), ids=COMBINED)
def test_a_resumed_run_of_combined_features_has_the_same_bits(words):
    common = ("trainer.save_freq=1", "trainer.resume_mode=auto", *LEARNS)
    undisturbed = train(*ORDERED, *words, *common, "trainer.total_training_steps=3", "trainer.default_local_dir=all")
    shutil.copytree("all/global_step_1", "parts/global_step_1")
    rest = train(*ORDERED, *words, *common, "trainer.total_training_steps=3", "trainer.default_local_dir=parts")
    assert [prompts(rest, step) for step in (0, 1)] == [prompts(undisturbed, step) for step in (1, 2)]
    for mine, other in zip(rest.batches, undisturbed.batches[1:], strict=True):
        for name, tensor in other.batch.items():
            assert torch.equal(mine.batch[name], tensor), name
    assert not differing("all/global_step_3/actor", "parts/global_step_3/actor")
    assert rest.trainer.state.ledger.account.faults == []
