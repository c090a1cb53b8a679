"""The schedules with a queue in one process: what is sampled when, what is refused, and what a checkpoint holds."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.ppo.small_runs import Seen, prepare, train
from verl.config import load_config
from verl.errors import ConfigError, DataError, RolloutError
from verl.trainer.ppo.queue import BoundBroken, GroupQueue, QueueBound
from verl.trainer.ppo.schedules.colocate_async import ColocateAsyncSchedule
from verl.trainer.ppo.schedules.fully_async import FullyAsyncSchedule
from verl.trainer.ppo.schedules.separate_async import SeparateAsyncSchedule

MODE = "trainer.v1.trainer_mode"
BASE = ("trainer.total_training_steps=4", "actor_rollout_ref.rollout.n=2", "actor_rollout_ref.actor.optim.lr=1e-2")
HALVES = ("async_training.trigger_parameter_sync_step=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2")
STREAM = (f"{MODE}=fully_async", "async_training.staleness_threshold=0.5", *HALVES)


@pytest.fixture(scope="module", autouse=True)
def here(tmp_path_factory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("queues"))
        prepare()
        yield


def run(folder: str, *changes: str) -> Seen:
    return train(
        *BASE, *changes, f"trainer.default_local_dir={folder}", "trainer.save_freq=1", "trainer.resume_mode=auto"
    )


def versions(seen: Seen) -> list[list[int]]:
    """Of every row of every step; each was drawn by one version."""
    columns = [batch.batch["token_versions"].amax(-1).tolist() for batch in seen.batches]
    return [[column[row] for row in range(0, len(column), 2)] for column in columns]


def weights(folder: str, step: int = 4) -> dict[tuple[str, str], torch.Tensor]:
    files = sorted(Path(folder, f"global_step_{step}", "actor").rglob("*.safetensors"))
    return {(file.name, name): tensor for file in files for name, tensor in load_file(file).items()}


def same(one: str, other: str) -> bool:
    a, b = weights(one), weights(other)
    return bool(a) and a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.fixture(scope="module")
def stream() -> Seen:
    return run("stream", *STREAM)


def test_with_nothing_sampled_ahead_the_weights_are_those_of_the_synchronous_schedule():
    run("sync", "trainer.skip_old_log_prob=false")
    run("still", f"{MODE}=colocate_async", "trainer.v1.colocate_async.num_warmup_batches=0")
    assert same("still", "sync")


def test_which_version_draws_what_follows_from_counts(stream):
    """T = 4 groups in chunks of 2, half a step ahead: 6 groups at first, then 4 with every version."""
    assert versions(stream) == [[0, 0, 0, 0], [0, 0, 1, 1], [1, 1, 2, 2], [2, 2, 3, 3]]
    assert [step["fully_async/staleness/mean"] for step in stream.metrics] == [0, 0.5, 0.5, 0.5]
    assert [step["fully_async/staleness/share_1"] for step in stream.metrics] == [0, 0.5, 0.5, 0.5]
    assert [step["count/staleness_samples"] for step in stream.metrics] == [0, 4, 4, 4]
    assert [step["count/total_generated_samples"] for step in stream.metrics] == [12, 20, 28, 32]
    assert [step["fully_async/queue/groups"] for step in stream.metrics] == [2, 2, 2, 0]
    assert [step["training/off_policy/trajectory_staleness/max"] for step in stream.metrics] == [0, 1, 1, 1]


def test_a_batch_of_warm_up_makes_samples_one_version_old_and_another_half_makes_some_two():
    one = train(*BASE, f"{MODE}=separate_async", "actor_rollout_ref.actor.ppo_mini_batch_size=1")
    assert versions(one) == [[0] * 4, [0] * 4, [1] * 4, [2] * 4]
    more = train(*BASE, f"{MODE}=colocate_async", "trainer.v1.colocate_async.num_warmup_batches=1.5")
    assert versions(more) == [[0] * 4, [0] * 4, [0, 0, 1, 1], [1, 1, 2, 2]]


@pytest.mark.parametrize("stop", [1, 3])
def test_a_resumed_run_has_the_same_weights_bit_for_bit_and_no_prompt_twice(stream, stop):
    folder = f"resumed_{stop}"
    shutil.copytree("stream", folder)
    for step in range(stop + 1, 5):
        shutil.rmtree(Path(folder, f"global_step_{step}"))
    Path(folder, "latest_checkpointed_iteration.txt").write_text(str(stop))
    later = run(folder, *STREAM)
    assert len(later.batches) == 4 - stop and same(folder, "stream")
    seen = Counter(uid for batch in [*stream.batches[:stop], *later.batches] for uid in batch.non_tensor_batch["uid"])
    assert seen == Counter(uid for batch in stream.batches for uid in batch.non_tensor_batch["uid"])
    assert set(seen.values()) == {2}


def test_groups_without_signal_make_room_for_others_and_a_queue_of_them_alone_is_one_error(tmp_path, monkeypatch):
    flat = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n"
    Path("flat.py").write_text(flat)
    filters = ("algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=seq_reward")
    seen = train(*BASE, *STREAM, *filters)
    assert [len(batch) for batch in seen.batches] == [8] * 4
    assert sum(step["training/filter_groups/dropped_groups"] for step in seen.metrics) > 0
    assert all(step["training/off_policy/trajectory_staleness_worst/max"] <= 1 for step in seen.metrics)
    with pytest.raises(DataError, match="the queue starves: since the last update 12 groups") as error:
        train(*BASE, *STREAM, *filters, "algorithm.filter_groups.max_num_gen_batches=2",
              "reward.custom_reward_function.path=flat.py")  # fmt: skip
    assert error.value.key == "algorithm.filter_groups.max_num_gen_batches"


def test_a_rule_that_admits_too_much_is_caught_on_the_groups_and_on_the_tokens(monkeypatch):
    room = GroupQueue.room
    monkeypatch.setattr(GroupQueue, "room", lambda self: room(self) + self.bound.groups)
    with pytest.raises(BoundBroken, match="2 versions, where 1 are allowed"):
        train(*BASE, f"{MODE}=colocate_async")
    monkeypatch.setattr("verl.trainer.ppo.queue.check_version", lambda *_: None)
    with pytest.raises(RolloutError, match="step 3 trains version 2, and a sample has tokens of version 0"):
        train(*BASE, f"{MODE}=colocate_async")


@pytest.mark.parametrize(
    ("words", "key", "arithmetic"),
    [
        ((f"{MODE}=separate_async",), "trainer.v1.separate_async.parameter_sync_step", "x 4 prompts = 16"),
        (
            (f"{MODE}=colocate_async", "trainer.v1.colocate_async.num_warmup_batches=2.5",
             "trainer.v1.sampler.max_off_policy_threshold=2"),
            "trainer.v1.sampler.max_off_policy_threshold",
            "2.5 warm-up batches x 4 prompts = 10 prompts .* up to 3 versions old",
        ),
        ((*STREAM, "async_training.staleness_threshold=-1"), "async_training.staleness_threshold", "0 or more"),
        ((*STREAM, "algorithm.adv_estimator=opo"), "algorithm.adv_estimator", "samples of older versions"),
        (
            (*STREAM, "async_training.partial_rollout=true", "actor_rollout_ref.rollout.calculate_log_probs=false"),
            "actor_rollout_ref.rollout.calculate_log_probs",
            "log-probs",
        ),
        (
            (*STREAM, "trainer.v1.sampler.order=completion", "trainer.v1.sampler.max_off_policy_strategy=reweight"),
            "trainer.v1.sampler.max_off_policy_strategy",
            "nothing corrects",
        ),
        (
            (f"{MODE}=colocate_async", "trainer.v1.sampler.order=completion",
             "trainer.v1.sampler.max_off_policy_threshold=null"),
            "trainer.v1.sampler.max_off_policy_threshold",
            "nothing corrects for their age",
        ),
        ((*STREAM, "actor_rollout_ref.rollout.over_sample_rate=0.1"), "rollout.over_sample_rate", "on their own"),
    ],
)  # fmt: skip
def test_what_a_queue_cannot_keep_is_refused_before_anything_starts(words, key, arithmetic):
    needed = ["data.train_files=train.parquet", "actor_rollout_ref.model.path=model", "data.train_batch_size=4"]
    with pytest.raises(ConfigError, match=arithmetic) as error:
        load_config("ppo_trainer", [*needed, "actor_rollout_ref.actor.ppo_mini_batch_size=4", *words])
    assert key in str(error.value)


def test_the_bounds_that_settings_mean():
    def bound(schedule, *words):
        needed = ["data.train_files=train.parquet", "actor_rollout_ref.model.path=model"]
        return schedule.bound(load_config("ppo_trainer", [*needed, *words]))

    sized = ("data.train_batch_size=64", "actor_rollout_ref.actor.ppo_mini_batch_size=16")
    made = bound(
        FullyAsyncSchedule, f"{MODE}=fully_async", "data.train_batch_size=0", sized[1], "data.gen_batch_size=1"
    )
    assert (made.groups, made.chunk, made.most, made.allowed, made.in_order) == (64, 16, 70, 1, True)
    bypass = "algorithm.rollout_correction.bypass_mode=true"
    whole, single = (bound(SeparateAsyncSchedule, f"{MODE}=separate_async", *sized, *more) for more in ((), (bypass,)))
    assert (whole.chunk, single.chunk, whole.allowed) == (64, 16, 1)
    rules = ("trainer.v1.sampler.order=completion", "trainer.v1.sampler.max_off_policy_threshold=3")
    loose = bound(ColocateAsyncSchedule, f"{MODE}=colocate_async", *sized, *rules)
    assert loose == QueueBound(64, 64, 1, staleness=3, in_order=False, overdue="drop") and loose.allowed == 3
