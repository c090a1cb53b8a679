"""The stream of groups: what it resumes, under which schedule, and which schedules it refuses."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.harness.runs import Seen, train
from verl.config import PPOTrainerConfig, load_config, replace
from verl.errors import ConfigError, DataError
from verl.metrics import notices
from verl.protocol import DataProto
from verl.protocol.columns import object_array
from verl.trainer.ppo.context import RunState, StepContext
from verl.trainer.ppo.driver import Inline
from verl.trainer.ppo.group_filter import DETAILS
from verl.trainer.ppo.groups import GroupRows, judged, together
from verl.trainer.ppo.schedules import FULLY_ASYNC, ONE_STEP_OFF, SYNC, Schedule
from verl.trainer.ppo.stream import GroupStream
from verl.trainer.ppo.stream_parts import FINISHED, FLAT, PROMPTS, STATE

MODE = "trainer.v1.trainer_mode"
NEEDED = ("data.train_files=train.parquet", "actor_rollout_ref.model.path=model")
STREAM = (
    f"{MODE}=fully_async",
    "async_training.staleness_threshold=0.5",
    "async_training.trigger_parameter_sync_step=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
)
SIZES = {"actor_rollout_ref.rollout.n": 2, "data.train_batch_size": 2}


def run_state(**changes) -> RunState:
    return RunState(replace(PPOTrainerConfig(), **{**SIZES, **changes}), lambda batch: {}, total_steps=9, step=3)


def stream_of(schedule: Schedule, run: RunState) -> GroupStream:
    return GroupStream(schedule.admission(run.config), run, run.step, schedule.prefix)


def samples(uids: str, version: int = 2) -> DataProto:
    """Two samples of each prompt, of two response tokens."""
    names = [uid for uid in uids for _ in range(2)]
    tensors = {
        "prompts": torch.ones(len(names), 1, dtype=torch.long),
        "responses": torch.arange(2 * len(names)).reshape(-1, 2),
        "attention_mask": torch.ones(len(names), 3, dtype=torch.long),
        "token_versions": torch.full((len(names), 2), version, dtype=torch.int32),
    }
    return DataProto.from_dict(tensors, {"uid": names, "sample_index": [0, 1] * len(uids)})


def rows(uids: str) -> DataProto:
    return DataProto.from_dict(non_tensors={"uid": list(uids)})


def held(stream: GroupStream) -> str:
    return "".join(batch.non_tensor_batch["uid"][0] for batch in stream.held_samples())


def earlier_parts() -> dict[str, DataProto]:
    """As the release before wrote them: a batch ahead, surplus, two prompts in work and one that waited for them."""
    ahead, work = samples("ab"), rows("ddee")
    ahead.meta_info["context"] = {
        "step": 4, "metrics": {"reward/mean": [0.5, "mean", 1.0]}, "seconds": {"gen": 2.0}, "sample_info": ["acc"],
        "gen_batches": 2,
    }  # fmt: skip
    work.non_tensor_batch["sample_index"] = np.array([0, 1] * 2, dtype=object)
    work.non_tensor_batch["earlier"] = object_array([{"turn": number} for number in range(4)])
    return {"ahead": ahead, "surplus": samples("c", 1), "unfinished": work, "loaded_prompts": rows("f")}


def test_what_an_earlier_release_saved_in_four_parts_is_all_in_the_stream():
    stream = stream_of(SYNC, run_state(**{"actor_rollout_ref.rollout.keep_unfinished": True}))
    stream.load_state(earlier_parts())
    assert held(stream) == "abcde" and [entry.version for entry in stream.queue] == [2, 2, 1, 3, 3]
    states = [entry.prompt.alone().non_tensor_batch["earlier"][0] for entry in stream.queue if not entry.is_complete]
    assert states == [[{"turn": 0}, {"turn": 1}], [{"turn": 2}, {"turn": 3}]]
    assert [row.alone().non_tensor_batch["uid"][0] for row in stream._drawn.left] == ["f"]
    saved = stream.state()
    assert set(saved) == {FINISHED, PROMPTS} and saved[FINISHED].meta_info[STATE]["context"]["step"] == 4
    again = stream_of(SYNC, run_state(**{"actor_rollout_ref.rollout.keep_unfinished": True}))
    again.load_state(saved)
    assert held(again) == "abcde"
    step = again.run.open(4)
    step.take_in(again._ahead)
    assert step.metrics.values() == {"reward/mean": 0.5, "training/num_gen_batches": 2.0} and step.timers.seconds == {
        "gen": 2.0
    }


def test_one_step_off_trains_on_the_batch_that_was_ahead_and_drops_what_is_two_versions_old():
    stream = stream_of(ONE_STEP_OFF, run_state())
    stream.load_state({name: part for name, part in earlier_parts().items() if name in ("ahead", "surplus")})
    late = stream.queue.drop_overdue()
    assert ["".join(dict.fromkeys(entry.samples.alone().non_tensor_batch["uid"])) for entry in late] == ["c"]
    taken = [entry.samples.alone().non_tensor_batch["uid"][0] for entry in stream.queue.take()]
    assert taken == ["a", "b"] and not held(stream)


def test_a_queue_drops_what_a_schedule_without_one_left_and_says_how_much():
    changes = {"actor_rollout_ref.actor.ppo_mini_batch_size": 2, "async_training.staleness_threshold": 1.0}
    stream = stream_of(FULLY_ASYNC, run_state(**changes))
    stream.load_state({name: part for name, part in earlier_parts().items() if name in ("ahead", "surplus")})
    assert not len(stream.queue) and stream.queue.trained == 6
    assert "6 samples that waited for the next step are dropped" in notices()[f"{MODE}, resumed run"]


def test_groups_of_a_run_with_another_number_of_samples_are_dropped_by_name():
    for parts in (earlier_parts(), saved_by(SYNC)):
        stream = stream_of(SYNC, run_state(**{"actor_rollout_ref.rollout.n": 3}))
        stream.load_state({name: part for name, part in parts.items() if name != "loaded_prompts"})
        assert not stream.queue.complete_groups and held(stream) == ""
        assert "3 groups" in notices()["actor_rollout_ref.rollout.n, resumed run"]


def saved_by(schedule: Schedule) -> dict[str, DataProto]:
    """The parts of a checkpoint with what `earlier_parts` has."""
    stream = stream_of(schedule, run_state(**{"actor_rollout_ref.rollout.keep_unfinished": True}))
    stream.load_state(earlier_parts())
    return stream.state()


def test_a_batch_names_the_details_of_the_score_that_its_samples_have():
    """A recipe looks for every detail that is named, in a column of the batch."""
    run, ahead = run_state(), samples("ab")
    ahead.non_tensor_batch["acc"] = object_array([1.0, 0.0, 0.5, 0.5])
    parts = earlier_parts()["ahead"].meta_info
    parts["context"]["sample_info"] = ["acc", "why"]
    ahead.meta_info |= parts
    stream = stream_of(SYNC, run)
    stream.load_state({"ahead": ahead})
    stream._driver = Inline({}, by_batch=True)
    ctx = run.open(4)
    stream.open_step(ctx)
    batch = stream.take(None, ctx, may_stop=False)
    assert batch.meta_info[DETAILS] == ["acc"] and len(batch) == 4


def test_joined_samples_name_the_details_of_the_score_of_every_part():
    parts = [samples("a"), samples("b"), samples("c")]
    for part, names in zip(parts, (["acc"], [], ["why", "acc"])):
        part.meta_info[DETAILS] = names
        part.non_tensor_batch |= {name: object_array([name] * 2) for name in names}
    batch = together(parts)
    assert batch.meta_info[DETAILS] == ["acc", "why"]
    assert batch.non_tensor_batch["why"].tolist() == [None] * 4 + ["why"] * 2
    assert parts[1].meta_info[DETAILS] == [], "the parts stay as they are"


def test_samples_of_other_batches_than_were_begun_are_an_error_that_names_the_files():
    ctx = run_state(**{"skip.rollout.enable": True}).open(4)
    with pytest.raises(DataError, match=r"2 prompts x 2 samples .* 2 came back.*max_inflight") as error:
        judged([0, 1], samples("a"), ctx, trims=False)
    assert error.value.key == "skip.rollout"


def test_what_a_filter_drops_is_not_held_in_memory_with_what_waits():
    ctx = run_state(**{"algorithm.filter_groups.enable": True}).open(4)
    batch = samples("abc")
    batch.batch["token_level_scores"] = torch.tensor([[0.0, 1], [0, 0], [1, 0], [0, 1], [0, 0], [1, 0]])
    done = judged([7, 8, 9], batch, ctx, trims=False)
    assert [(one.number, one.why, len(one.rows)) for one in done] == [(7, "", 2), (8, "filtered", 0), (9, "", 2)]
    assert [list(one.rows.alone().non_tensor_batch["uid"]) for one in done] == [["a", "a"], [], ["c", "c"]]
    assert all(len(one.rows.batch) == 4 for one in done)


def stream_with(rewards: dict[str, list[float]], left_out: str = "") -> tuple[GroupStream, StepContext]:
    """A stream that took in these groups of two samples; the last sample of some does not count. Rows: 5, 6, ..."""
    run = run_state(**{"algorithm.filter_groups.enable": True})
    stream, ctx, batch = stream_of(SYNC, run), run.open(4), samples("".join(rewards), version=3)
    prompts = [rows(uid) for uid in rewards]
    for row, prompt in enumerate(prompts, start=5):
        prompt.non_tensor_batch["__row__"] = np.array([row], dtype=object)
    batch.batch["token_level_scores"] = torch.tensor([[0.0, reward] for pair in rewards.values() for reward in pair])
    counts = [uid not in left_out or sample == 0 for uid in rewards for sample in range(2)]
    batch.non_tensor_batch["unscorable"] = ~np.array(counts)
    stream._driver = Inline({}, by_batch=True)
    numbers = [stream.queue.admit(GroupRows.of(prompt)) for prompt in prompts]
    stream._driver._done = judged(numbers, batch, ctx, trims=False)
    stream.take_in(ctx, wait=False)
    return stream, ctx


def test_rows_of_equal_groups_are_saved_and_come_with_the_next_batch():
    rewards = {"a": [1.0, 1.0], "b": [0.0, 1.0], "c": [1.0, 1.0], "d": [1.0, 0.0], "e": [0.0, 0.0]}
    stream, ctx = stream_with(rewards, left_out="c")
    assert ctx.flat_rows == []
    saved = stream.state()
    resumed, step = stream_of(SYNC, stream.run), stream.run.open(4)
    resumed.load_state(saved)
    resumed._driver = Inline({}, by_batch=True)
    for taking, at in ((stream, ctx), (resumed, step)):
        taking.open_step(at)
        batch = taking.take(None, at, may_stop=False)
        assert list(dict.fromkeys(batch.non_tensor_batch["uid"])) == ["b", "d"]
        assert at.flat_rows == [5, 9], "c compares nothing"
        assert taking.state() == {}
    assert saved[FLAT].non_tensor_batch["__row__"].tolist() == [5, 9], "a state does not change any more"


def test_rows_of_equal_groups_are_saved_where_nothing_else_waits():
    stream, _ = stream_with({"a": [1.0, 1.0]})
    saved = stream.state()
    assert set(saved) == {FLAT}
    resumed = stream_of(SYNC, stream.run)
    resumed.load_state(saved)
    assert resumed.state()[FLAT].non_tensor_batch["__row__"].tolist() == [5]


@pytest.fixture(scope="module")
def streamed(shared_here) -> Seen:
    return train(*STREAM, "trainer.total_training_steps=2", "trainer.save_freq=1", "trainer.default_local_dir=streamed")


def test_prompts_that_a_queue_had_drawn_are_the_first_that_a_synchronous_run_samples(streamed):
    folder = Path("in_turn/global_step_1")
    shutil.copytree("streamed/global_step_1", folder)
    state = DataProto.load_from_disk(str(folder / FINISHED / "batch")).meta_info[STATE]
    waiting = DataProto.load_from_disk(str(folder / PROMPTS / "batch"))
    complete = sum(place >= 0 for _, _, place in state["entries"])
    assert complete == 2 and len(waiting) == 2
    sync = train(f"{MODE}=sync", "trainer.resume_changed=accept", "trainer.resume_mode=auto", *STREAM[3:],
                 "trainer.total_training_steps=2", "trainer.default_local_dir=in_turn")  # fmt: skip
    uids = list(dict.fromkeys(sync.batches[0].non_tensor_batch["uid"]))
    assert uids[2:] == list(waiting.non_tensor_batch["uid"]), "none is left out of its epoch"
    assert not len(sync.trainer.schedule.stream.queue), "and no more are sampled than the step takes"
    assert sync.trainer.state.ledger.account.faults == []


def rated(batch, roles, ctx) -> None:
    ctx.metrics.add("recipe/rows", len(batch))


RATED = dataclasses.replace(ONE_STEP_OFF, stages=(rated,))


class OldSchedule:
    """A class, as schedules were once."""

    def step(self, source, roles, ctx): ...


@pytest.mark.usefixtures("shared_here")
def test_a_row_of_the_users_own_brings_its_stages_to_any_schedule():
    seen = train(f"{MODE}={__name__}:RATED", "trainer.total_training_steps=2")
    assert [step["recipe/rows"] for step in seen.metrics] == [16, 16]
    versions = [set(batch.batch["token_versions"].flatten().tolist()) - {-1} for batch in seen.batches]
    assert versions == [{0}, {0}], "the second batch was sampled ahead"


@pytest.mark.usefixtures("shared_here")
def test_a_class_is_no_schedule_and_the_message_says_what_to_write():
    with pytest.raises(ConfigError, match=r"row of data and no class.*OldSchedule.*dataclasses.replace\(SYNC"):
        load_config("ppo_trainer", [*NEEDED, f"{MODE}={__name__}:OldSchedule"])


@pytest.mark.usefixtures("shared_here")
def test_a_module_that_imports_the_old_base_gets_the_same_answer(monkeypatch):
    Path("my_old.py").write_text("from verl.trainer.ppo.schedules.sync import SyncSchedule\n")
    monkeypatch.syspath_prepend(str(Path.cwd()))
    for named in ("my_old:Mine", "verl.trainer.ppo.schedules.sync:SyncSchedule"):
        with pytest.raises(ConfigError, match=rf"row of data and no class.*{named}.*dataclasses.replace\(SYNC"):
            load_config("ppo_trainer", [*NEEDED, f"{MODE}={named}"])
