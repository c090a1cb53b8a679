"""`collect` of the next step and `learn` of this one, open at once: each has its own context of the one run."""

from __future__ import annotations

import pytest

from tests.harness.runs import numbers, prepare, train
from tests.harness.scorers import scorer
from verl.config import PPOTrainerConfig, replace
from verl.trainer.ppo import ray_trainer
from verl.trainer.ppo.callbacks import Callback
from verl.trainer.ppo.context import RunState
from verl.trainer.ppo.group_filter import DETAILS
from verl.trainer.ppo.schedules import ScheduleRun
from verl.trainer.ppo.step import learn

LEARNS = ("adv", "update_actor", "old_log_prob")
SCORER = scorer("{'score': len(set(solution_str)) / 10, 'letters': len(solution_str)}")
RUN = (
    "trainer.total_training_steps=3",
    "trainer.skip_old_log_prob=false",
    "actor_rollout_ref.actor.optim.lr=0",
)
"""The policy stays as it is, so it does not matter to a sample whether the update before it is over."""


OPENED = []


class Ahead(ScheduleRun):
    """Samples the next batch in the middle of the update before it."""

    def _learn(self, batch, source, roles, ctx):
        def collect_next(_, roles, learning):
            before = learning.metrics.values(), set(learning.timers.seconds)
            half = ctx.run.open(learning.step + 1)
            self.stream.prefetch(source, half, may_stop=False)
            assert before == (learning.metrics.values(), set(learning.timers.seconds))
            OPENED.append((learning.step, half.step, ctx.run.epoch_of(half.step), set(half.timers.seconds)))

        last = ctx.step == ctx.run.total_steps
        return learn(batch, roles, ctx, () if last else (collect_next,))


class Books(Callback):
    """What each step's context holds at its end."""

    def __init__(self):
        self.books = []

    def on_step_end(self, trainer, batch):
        ctx = trainer.ctx
        details = {name: list(batch.non_tensor_batch[name]) for name in batch.meta_info[DETAILS]}
        batches = ctx.metrics.values()["training/num_gen_batches"]
        self.books.append((ctx.step, ctx.run.epoch_of(ctx.step), details, set(ctx.timers.seconds), batches))


def test_halves_of_two_steps_that_are_open_at_once_keep_their_own_numbers(workplace, monkeypatch):
    prepare(scorer=SCORER)
    OPENED.clear()
    in_turn, at_once = Books(), Books()
    first = train(*RUN, watch=in_turn)
    monkeypatch.setattr(ray_trainer, "ScheduleRun", Ahead)
    second = train(*RUN, watch=at_once)
    assert [numbers(step) for step in second.metrics] == [numbers(step) for step in first.metrics]
    for mine, other in zip(second.batches, first.batches, strict=True):
        assert mine.batch["responses"].tolist() == other.batch["responses"].tolist()
        assert mine.batch["advantages"].tolist() == other.batch["advantages"].tolist()
    assert at_once.books == in_turn.books and [book[:2] for book in at_once.books] == [(1, 0), (2, 0), (3, 1)]
    letters = [list(book[2]["letters"]) for book in at_once.books]
    assert letters[0] != letters[1] != letters[2], "each step's own samples"
    assert [steps[:3] for steps in OPENED] == [(1, 2, 0), (2, 3, 1)]
    assert all({"gen", "reward"} <= timed and not timed & set(LEARNS) for *_, timed in OPENED)
    assert all(set(LEARNS) <= book[3] for book in at_once.books)


def test_two_contexts_of_a_run_share_its_state_and_nothing_else():
    config = replace(PPOTrainerConfig(), **{"algorithm.filter_groups.enable": True})
    run = RunState(config, reward=lambda batch: {}, total_steps=9, steps_per_epoch=2)
    learning, collecting = run.open(4), run.open(5)
    with learning.timed("update_actor"), collecting.timed("gen"):
        learning.metrics.add("actor/loss", 1.0)
        collecting.metrics.add("training/aborted_samples", 3, "sum")
        learning.metrics.add("actor/loss", 3.0)
    assert (learning.step, collecting.step) == (4, 5) and [run.epoch_of(step) for step in (4, 5)] == [1, 2]
    assert learning.metrics.values() == {"actor/loss": 2.0}
    assert collecting.metrics.values() == {"training/aborted_samples": 3.0}
    assert set(learning.timers.seconds) == {"update_actor"} and set(collecting.timers.seconds) == {"gen"}
    assert learning.run is collecting.run is run and learning.run.kl_controller is collecting.run.kl_controller
    run.stop = stop = type(run.stop)()
    assert learning.run.stop is collecting.run.stop is stop


def test_a_half_that_ran_ahead_is_taken_into_the_context_of_its_step():
    run = RunState(PPOTrainerConfig(), reward=lambda batch: {}, total_steps=9)
    half, step = run.open(2), run.open(2)
    for book in (half, step):
        with book.timed("gen"):
            book.metrics.add("training/zero_variance_groups", 1.0 if book is half else 0.0)
    half.metrics.add("training/num_gen_batches", 3, "sum")
    spent = half.timers.seconds["gen"] + step.timers.seconds["gen"]
    step.take_in(half)
    assert step.metrics.values() == {"training/zero_variance_groups": 0.5, "training/num_gen_batches": 3.0}
    assert step.timers.seconds == {"gen": pytest.approx(spent)}
    with pytest.raises(AssertionError, match="step 2 was given to step 3"):
        run.open(3).take_in(half)
