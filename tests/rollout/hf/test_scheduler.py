"""The waiting line: slots, token budgets, chunks, prompts that are computed once, cancellation."""

from __future__ import annotations

from verl.rollout import Request, SamplingParams
from verl.rollout.hf.rows import Prompt, Row
from verl.rollout.hf.scheduler import Scheduler


def line(scheduler: Scheduler, *prompts: tuple[int, ...], priority: int = 0) -> list[Row]:
    rows = []
    for number, tokens in enumerate(prompts):
        request = Request(str(number), tokens, SamplingParams(), priority=priority)
        row = Row(request, scheduler.prompt_for(tokens), frozenset(), key=None)
        scheduler.add(row)
        rows.append(row)
    return rows


def finish(scheduler: Scheduler, *prompts: Prompt) -> None:
    """What the sampler does with complete prompts."""
    for prompt in prompts:
        prompt.num_done, prompt.logits = prompt.length, "logits"
        scheduler.take(prompt)
        scheduler.release(prompt)


def spans(admission) -> list[tuple[tuple[int, ...], int, int]]:
    return [(c.prompt.token_ids, c.start, c.end) for c in admission.chunks]


def test_equal_prompts_are_computed_once():
    scheduler = Scheduler(8, 100)
    rows = line(scheduler, (1, 2), (1, 2), (3,), (1, 2))
    found = scheduler.admit(0)
    assert spans(found) == [((3,), 0, 1), ((1, 2), 0, 2)]
    assert rows[0].prompt.rows == [rows[0], rows[1], rows[3]]
    assert scheduler.prompt_hits == 2
    assert Scheduler(8, 100, share=False).prompt_for((1,)) is not Scheduler(8, 100, share=False).prompt_for((1,))


def test_rows_beyond_the_slots_wait_and_then_join_without_another_computation():
    scheduler = Scheduler(2, 100)
    rows = line(scheduler, (1, 2), (1, 2), (1, 2), (4,))
    first = scheduler.admit(0)
    assert [row.state for row in rows] == ["admitted", "admitted", "waiting", "waiting"]
    finish(scheduler, first.chunks[0].prompt)
    assert scheduler.admit(2).chunks == []
    second = scheduler.admit(0)
    assert second.joining == [rows[2].prompt] and spans(second) == [((4,), 0, 1)]
    finish(scheduler, *second.joining, second.chunks[0].prompt)
    assert rows[2].prompt.logits is None, "nobody waits for it any more"
    assert scheduler.is_empty


def test_a_long_prompt_is_computed_in_pieces_within_the_budget():
    scheduler = Scheduler(8, 10)
    rows = line(scheduler, tuple(range(14)), (50, 51), (50, 51))
    assert spans(scheduler.admit(4)) == [(tuple(range(14)), 0, 6)]
    rows[0].prompt.num_done = 6
    found = scheduler.admit(1)
    assert spans(found) == [((50, 51), 0, 1), (tuple(range(14)), 6, 14)]
    assert [row.state for row in rows] == ["admitted"] * 3


def test_a_runner_that_cannot_cut_prompts_gets_a_long_one_whole():
    scheduler = Scheduler(8, 4, can_chunk=False)
    line(scheduler, (1,) * 9, (2,) * 3, (3,))
    assert spans(scheduler.admit(0)) == [((1,) * 9, 0, 9)]
    finish(scheduler, *[c.prompt for c in scheduler.admit(0).chunks][:1])


def test_the_smaller_priority_goes_first():
    scheduler = Scheduler(1, 100)
    late = line(scheduler, (1,), priority=5)
    early = line(scheduler, (2,), priority=-1)
    scheduler.admit(0)
    assert (early[0].state, late[0].state) == ("admitted", "waiting")


def test_rows_that_leave_free_their_slot_and_their_prompt():
    scheduler = Scheduler(2, 100)
    rows = line(scheduler, (1,), (2,), (3,))
    scheduler.leave(rows[1])
    found = scheduler.admit(0)
    assert spans(found) == [((1,), 0, 1), ((3,), 0, 1)]
    scheduler.leave(rows[0])
    assert scheduler.pending == [rows[2]]
    scheduler.leave(rows[2])
    assert scheduler.is_empty and scheduler.admit(0).chunks == []
    again = scheduler.prompt_for((1,))
    assert again is not rows[0].prompt


def test_new_weights_make_half_computed_prompts_start_again():
    scheduler = Scheduler(8, 4)
    rows = line(scheduler, tuple(range(6)))
    scheduler.admit(0)
    rows[0].prompt.num_done = 4
    scheduler.forget_prompts()
    assert spans(scheduler.admit(0)) == [(tuple(range(6)), 0, 4)]


def test_dropping_everything_returns_who_had_no_token_yet():
    scheduler = Scheduler(1, 4)
    rows = line(scheduler, (1,), (2,))
    scheduler.admit(0)
    assert scheduler.drop_all() == rows
    assert scheduler.is_empty and {row.state for row in rows} == {"ended"}
