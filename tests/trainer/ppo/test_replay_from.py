"""A run under an asynchronous schedule, and its replay: the same decisions, and the same weights bit for bit."""

from __future__ import annotations

import asyncio
import random
import shutil
from pathlib import Path
from typing import ClassVar

import pytest

from tests.harness.runs import Seen, differing, records, train
from verl.errors import ConfigError, DataError, ReplayError, RewardError, RolloutError
from verl.journal import file
from verl.journal.file import NAME, Position, entries_in, entry_line, segments_of
from verl.journal.ledger_reader import History
from verl.journal.schedule import Script
from verl.metrics import notices, reset_notices
from verl.trainer.ppo import driver, record
from verl.trainer.ppo.groups import Done, GroupRows

MODE, RULES, BOUND = "trainer.v1.trainer_mode", "trainer.v1.sampler", "trainer.journal_max_bytes"
BASE = (
    "trainer.total_training_steps=3",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.actor.optim.lr=1e-2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.rollout.full_determinism=true",
    f"{MODE}=fully_async",
    "async_training.trigger_parameter_sync_step=2",
    "async_training.staleness_threshold=1",
    "algorithm.rollout_correction.bypass_mode=true",
    f"{RULES}.order=completion",
)

pytestmark = pytest.mark.usefixtures("shared_here")


class Explored(driver.Driven):
    """Groups end one after another in an order, and at moments, that a die decides; some fail the first time."""

    die = random.Random(0)
    failing: ClassVar[set[int]] = set()

    async def _group(self, number, asked, half, spans):
        if number not in self.failing:
            return await super()._group(number, asked, half, spans)
        self.failing.remove(number)
        self._done.put((Done(number, GroupRows.of(asked), why="failed"), half, RolloutError("no process is left")))

    def ended(self, ctx, wait, may_stop):
        for _ in range(self.die.randrange(12)):
            self._loop.run_until_complete(asyncio.sleep(0))
        if not wait and self.die.random() < 0.6:
            return []
        done = list(super().ended(ctx, wait, may_stop))
        self.die.shuffle(done)
        return done


def run(folder: str, *changes: str) -> Seen:
    return train(
        *BASE, f"trainer.default_local_dir={folder}", "trainer.save_freq=1", "trainer.resume_mode=auto", *changes
    )


def explored(folder: str, seed: int, *changes: str, failing: tuple[int, ...] = ()) -> Seen:
    """A run whose groups are sampled one by one, and end in a random order."""
    Explored.die, Explored.failing = random.Random(seed), {*failing}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "Inline", Explored)
        patch.setattr(record, "samples_while_training", lambda config: True)
        return run(folder, *changes)


def same(one: str, other: str) -> bool:
    return not differing(f"{one}/global_step_3/actor", f"{other}/global_step_3/actor")


def taken(folder: str) -> list[list[int]]:
    return [one["groups"] for one in Script.read(Path(folder)).decisions if one["event"] == "take"]


@pytest.fixture(scope="module")
def recorded(shared_here) -> None:
    """The folders ``run_drop`` and ``run_wait``, of runs that differ in the rule for stale groups."""
    for seed, rule in enumerate(("drop", "wait")):
        explored(f"run_{rule}", seed, f"{RULES}.max_off_policy_strategy={rule}", failing=(5,) if rule == "wait" else ())


@pytest.mark.usefixtures("recorded")
def test_groups_that_ended_in_a_random_order_end_in_it_again_and_the_weights_have_the_same_bits():
    for rule in ("drop", "wait"):
        assert taken(f"run_{rule}") != [[2 * number, 2 * number + 1] for number in range(6)]  # a random order
        run(f"again_{rule}", f"{RULES}.max_off_policy_strategy={rule}", f"trainer.replay_from=run_{rule}")
        assert same(f"again_{rule}", f"run_{rule}") and taken(f"again_{rule}") == taken(f"run_{rule}")
    assert not same("run_drop", "run_wait")
    ends = [[why for one in Script.read(Path(name)).decisions if one["event"] == "ended"
             for why in (group["why"] for group in one["groups"] if group["group"] == 5)]
            for name in ("run_wait", "again_wait")]  # fmt: skip
    assert ends == [["failed", ""]] * 2  # sampled once more, in both


@pytest.mark.usefixtures("recorded")
def test_a_run_that_was_killed_goes_on_from_its_checkpoint_with_the_decisions_that_it_had_taken_and_equal_weights():
    """Groups that had been sampled ahead at step 2 are in the checkpoint, or their tokens are in the record."""
    shutil.copytree("run_drop", "killed")
    shutil.rmtree("killed/global_step_3")
    Path("killed/latest_checkpointed_iteration.txt").write_text("2")
    settings = (f"{RULES}.max_off_policy_strategy=drop", "trainer.replay_from=killed")
    later = run("killed", *settings)
    assert len(later.batches) == 1 and same("killed", "run_drop") and taken("killed") == taken("run_drop")


@pytest.mark.usefixtures("recorded")
def test_a_run_that_was_killed_and_decided_anew_has_one_schedule_which_a_replay_follows_from_the_beginning():
    shutil.copytree("run_drop", "anew")
    shutil.rmtree("anew/global_step_3")
    Path("anew/latest_checkpointed_iteration.txt").write_text("2")
    rule = f"{RULES}.max_off_policy_strategy=drop"
    explored("anew", 7, rule)
    assert "again" in [one["event"] for one in Script.read(Path("anew")).decisions]
    replaced = len(list(entries_in(Path("anew", NAME), replaced=True))) - len(list(entries_in(Path("anew", NAME))))
    assert replaced > 0 and not same("anew", "run_drop")
    run("anew_again", rule, "trainer.replay_from=anew")
    assert same("anew_again", "anew") and taken("anew_again") == taken("anew")


@pytest.mark.usefixtures("recorded")
def test_a_record_that_ends_with_its_checkpoint_is_continued_and_replayed():
    """The run was killed right after a save: what was in flight is sampled again, with the weights of that step."""
    shutil.copytree("run_drop", "at_end")
    journal, place = Path("at_end", NAME), Position.read(Path("at_end/global_step_2"))
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(lines[: place.entries]))
    assert len(Script.read(Path("at_end")).decisions) == place.decisions
    for folder in ("continued", "replayed"):
        shutil.rmtree("at_end/global_step_3")
        Path("at_end/latest_checkpointed_iteration.txt").write_text("2")
        run("at_end", f"{RULES}.max_off_policy_strategy=drop", "trainer.replay_from=at_end")
        shutil.copytree("at_end", folder)
    later = Script.read(Path("continued")).decisions[place.decisions :]
    assert [one["event"] for one in later[:2]] == ["weights", "again"] and later[1]["groups"]
    assert same("replayed", "continued") and taken("replayed") == taken("continued")


@pytest.mark.usefixtures("recorded")
def test_a_segment_per_step_is_replayed_and_resumed_with_equal_weights(monkeypatch):
    monkeypatch.setattr(file, "SEGMENT_BYTES", 1)
    settings = (f"{RULES}.max_off_policy_strategy=drop", f"{BOUND}=null")
    explored("cut", 0, *settings)
    assert sorted(segments_of(Path("cut", NAME))) == [1, 2, 3, 4]
    run("cut_again", *settings, "trainer.replay_from=cut")
    shutil.rmtree("cut/global_step_3")
    Path("cut/latest_checkpointed_iteration.txt").write_text("2")
    run("cut", *settings, "trainer.replay_from=cut")
    assert same("cut", "cut_again") and taken("cut") == taken("cut_again")
    assert History.of(Path("cut", NAME)).faults == []


@pytest.mark.usefixtures("recorded")
def test_a_run_with_the_least_journal_resumes_with_equal_weights():
    """A bound of one byte: what is left is what the checkpoint of step 2 needs."""
    settings = (f"{RULES}.max_off_policy_strategy=drop", "trainer.total_training_steps=3")
    for folder, bound in (("much", "null"), ("little", "1")):
        explored(folder, 0, *settings, "trainer.total_training_steps=2", f"{BOUND}={bound}")
        shutil.copytree(folder, f"{folder}_replayed")
        explored(folder, 7, *settings, f"{BOUND}={bound}")
    assert sorted(segments_of(Path("little", NAME))) == [1, 3, 4] and same("little", "much")
    little, much = (History.of(Path(folder, NAME)) for folder in ("little", "much"))
    assert (little.sampled, little.trained, little.dropped) == (much.sampled, much.trained, much.dropped)
    run("little_replayed", *settings, "trainer.replay_from=little")
    assert same("little_replayed", "much"), "on from step 2 it has every decision"
    with pytest.raises(ReplayError, match=r"speaks of the steps after 2.*journal_max_bytes"):
        run("from_the_beginning", *settings, "trainer.replay_from=little")


@pytest.mark.usefixtures("recorded")
def test_a_record_that_ends_early_is_followed_to_its_end_and_the_run_goes_on():
    lines = Path("run_drop", NAME).read_text().splitlines(keepends=True)
    Path("early").mkdir()
    Path("early", NAME).write_text(lines[0])  # of a run that was killed before its first checkpoint
    Path("early", "journal-2.jsonl").write_text("".join(lines[: len(lines) // 2]) + '{"event":"ended","st')
    reset_notices()
    seen = run("after_early", f"{RULES}.max_off_policy_strategy=drop", "trainer.replay_from=early")
    followed = Script.read(Path("early")).decisions
    assert (
        len(seen.batches) == 3
        and f"the record ends after {len(followed)} decisions" in notices()["trainer.replay_from"]
    )
    ours = [one for one in records(Path("after_early", NAME)) if "t" in one]
    assert [one["event"] for one in ours[: len(followed)]] == [one["event"] for one in followed]
    assert seen.metrics[-1]["replay/decisions_left"] == 0


@pytest.mark.usefixtures("recorded")
def test_another_decision_than_the_recorded_one_ends_the_run_and_names_the_first():
    script = Script.read(Path("run_drop"))
    lines = list(entries_in(Path("run_drop", NAME)))
    number = next(n for n, one in enumerate(lines) if one["event"] == "update")
    lines[number] = {**lines[number], "grad_norm": lines[number]["grad_norm"] + 1e-12}
    decision = lines[number]["t"]
    Path("wrong").mkdir()
    Path("wrong", NAME).write_bytes(b"".join(map(entry_line, lines)))
    with pytest.raises(
        ReplayError, match=rf"decision {decision} differs .* update grad_norm={lines[number]['grad_norm']}"
    ):
        run("wrong_here", f"{RULES}.max_off_policy_strategy=drop", "trainer.replay_from=wrong")
    assert script.decisions[decision]["event"] == "update"


@pytest.mark.usefixtures("recorded")
def test_a_replay_that_would_have_other_bits_is_refused_with_every_key_before_anything_starts():
    with pytest.raises(ConfigError) as error:
        run("other", f"{RULES}.max_off_policy_strategy=wait", "trainer.replay_from=run_drop",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1", "trainer.log_val_generations=1")  # fmt: skip
    assert error.value.key == "trainer.replay_from" and not Path("other", "config.yaml").exists()
    listed = [line.partition(":")[0].strip(" -") for line in str(error.value).splitlines()[1:] if "was" in line]
    assert listed == ["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", f"{RULES}.max_off_policy_strategy"]


def test_a_group_of_which_no_sample_has_a_score_is_left_out_counted_and_left_out_again_in_a_replay():
    picky = "reward.custom_reward_function.path=picky.py"
    Path("picky.py").write_text("""def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if extra_info["index"] % 3 == 1:
        raise ValueError("not this one")
    return len(set(solution_str)) / 10
""")
    seen = explored("picky", 3, picky)
    again = run("picky_again", picky, "trainer.replay_from=picky")
    assert same("picky_again", "picky") and taken("picky_again") == taken("picky")
    counts = [[step.get("reward/unscorable", 0.0) for step in one.metrics] for one in (seen, again)]
    dropped = [History.of(Path(folder, NAME)).dropped for folder in ("picky", "picky_again")]
    assert counts[0] == counts[1] and dropped[0] == dropped[1]
    assert dropped[0]["unscorable"] == sum(counts[0]) > 0
    assert "not this one" in notices()["reward, groups"]


def test_a_run_of_which_no_group_gets_a_score_ends_with_one_error():
    Path("broken.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    1 / 0\n"
    )
    for begin in (explored, lambda folder, _, *changes: run(folder, *changes)):
        with pytest.raises(RewardError, match=r"no sample of 8 groups in a row got a score: .* division by zero"):
            begin("broken", 4, "reward.custom_reward_function.path=broken.py")
        shutil.rmtree("broken")


@pytest.mark.parametrize(
    "line",
    [
        '{"event":"weights","t":0}',
        '{"event":"admit","t":0,"groups":3}',
        '{"event":"ended","t":0,"groups":[7]}',
        '{"event":"ended","t":0,"groups":[{"group":0,"why":""}]}',
        '{"event":"ended","t":0,"groups":[{"group":0,"why":"","requests":{"a":{"spans":[1],"finish":""}}}]}',
    ],
)
def test_a_damaged_decision_is_named_with_its_line(tmp_path, line):
    first = '{"event":"run","format":1,"settings":{}}'
    (tmp_path / "schedule.jsonl").write_text(f"{first}\n{line}\n")
    with pytest.raises(DataError, match=r"entry 2 of the record is damaged.*schedule\.jsonl"):
        Script.read(tmp_path)


def test_a_record_that_names_no_format_is_refused(tmp_path):
    (tmp_path / "schedule.jsonl").write_text('{"event":"run","settings":{}}\n')
    with pytest.raises(DataError, match="a record of another format"):
        Script.read(tmp_path)
