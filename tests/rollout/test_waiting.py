"""Whose turn it is when a slot is free: of a prompt that nobody knows yet, else of the one that takes longest."""

from __future__ import annotations

import asyncio
import random
import statistics
from pathlib import Path

import pytest

from verl.rollout import Request, SamplingParams
from verl.rollout.waiting import OLDEST_EVERY, Queue


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def sample(prompt, number):
    return Request(f"{prompt}{number}", (1,), SamplingParams(max_tokens=2), uid=prompt, sample_index=number)


class Waiting:
    """Samples that wait in a queue, and the order in which their turn came."""

    def __init__(self):
        self.clock, self.order, self._tasks = Clock(), [], []
        self.queue = Queue(self.clock)

    async def add(self, *requests):
        for request in requests:
            self._tasks.append(asyncio.ensure_future(self._one(request, self.queue.arrived())))
        await asyncio.sleep(0)

    async def _one(self, request, arrival):
        await self.queue.turn(request, arrival)
        self.order.append(request.id)

    def ran(self, prompt, seconds, in_full=True):
        """Another sample of a prompt had an answer after so many seconds."""
        one, arrival = sample(prompt, 99), self.queue.arrived()
        self.queue.began(one, arrival)
        self.clock.now += seconds
        self.queue.ended(one, arrival, in_full=in_full)

    async def call(self, times):
        for _ in range(times):
            self.queue.call_next()
            await asyncio.sleep(0)
        for task in self._tasks:
            task.cancel()
        return self.order


async def test_first_an_unknown_prompt_then_those_whose_samples_took_longest():
    waiting = Waiting()
    await waiting.add(*(sample(prompt, number) for prompt in ("short", "long", "new") for number in range(2)))
    waiting.ran("short", 1.0)
    waiting.ran("long", 5.0)
    waiting.ran("long", 3.0)  # 4 seconds in the mean
    waiting.queue.call_next()
    await asyncio.sleep(0)
    waiting.ran("new", 2.0)
    assert await waiting.call(5) == ["new0", "long0", "long1", "new1", "short0", "short1"]


async def test_a_sample_that_still_runs_takes_at_least_as_long_as_it_has_run():
    waiting = Waiting()
    await waiting.add(sample("ended", 0), sample("running", 0))
    waiting.queue.began(sample("running", 9), waiting.queue.arrived())
    waiting.ran("ended", 3.0)
    waiting.clock.now += 1.0  # the other one runs for 4 seconds
    assert await waiting.call(2) == ["running0", "ended0"]


async def test_an_answer_that_was_broken_off_says_nothing_of_how_long_others_take():
    waiting = Waiting()
    await waiting.add(sample("b", 0), sample("a", 0))
    waiting.ran("a", 1.0)
    waiting.ran("b", 9.0, in_full=False)
    assert await waiting.call(2) == ["a0", "b0"]


def test_whose_turn_it_is_among_many_is_what_a_look_at_each_of_them_says():
    """Seconds are different for every prompt, so that there is one answer."""

    async def run(seed):
        waiting, draw, prompts = Waiting(), random.Random(seed), [f"p{number}" for number in range(12)]
        await waiting.add(*(sample(prompt, number) for prompt in prompts for number in range(4)))
        took, began, left = dict[str, list[float]](), dict[str, float](), dict.fromkeys(prompts, 4)
        for prompt in prompts:
            waiting.ran(prompt, seconds := draw.random())
            took[prompt] = [seconds]
        for call in range(1, 48):
            prompt = draw.choice(prompts)
            if draw.random() < 0.5 and prompt not in began:
                waiting.queue.began(sample(prompt, 99), -prompts.index(prompt))
                began[prompt] = waiting.clock.now
            elif prompt in began and left[prompt]:
                waiting.queue.ended(sample(prompt, 99), -prompts.index(prompt), in_full=True)
                took[prompt].append(waiting.clock.now - began.pop(prompt))
            waiting.clock.now += draw.random()
            now = waiting.clock.now
            expected = {one: max(statistics.mean(took[one]), now - began.get(one, now)) for one in prompts if left[one]}
            waiting.queue.call_next()
            await asyncio.sleep(0)
            chosen = waiting.order[-1][:-1]
            left[chosen] -= 1
            if call % OLDEST_EVERY:
                assert chosen == max(expected, key=expected.__getitem__), (seed, call)
        await waiting.call(0)

    for seed in range(20):
        asyncio.run(run(seed))


async def test_the_one_that_came_first_is_not_passed_over_for_ever():
    waiting = Waiting()
    await waiting.add(sample("short", 0))
    waiting.ran("short", 1.0)
    await waiting.add(*(sample(f"new{number}", 0) for number in range(2 * OLDEST_EVERY)))
    order = await waiting.call(OLDEST_EVERY)
    assert order[-1] == "short0" and len(order) == OLDEST_EVERY == 8


async def test_who_has_to_wait_again_keeps_its_place_and_who_has_gone_takes_no_turn():
    waiting = Waiting()
    early = waiting.queue.arrived()
    await waiting.add(sample("a", 1), sample("a", 2))
    again = asyncio.ensure_future(waiting.queue.turn(sample("a", 0), early))
    await asyncio.sleep(0)
    waiting._tasks[0].cancel()
    await asyncio.sleep(0)
    waiting.queue.call_next()
    await asyncio.sleep(0)
    assert again.done() and waiting.order == []
    assert await waiting.call(1) == ["a2"]


async def test_a_turn_that_came_as_its_request_was_cancelled_is_the_next_one_s():
    waiting = Waiting()
    await waiting.add(sample("a", 0), sample("b", 0))
    waiting.queue.call_next()
    waiting._tasks[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting._tasks[0]
    await asyncio.sleep(0)
    assert waiting.order == ["b0"]


async def test_nothing_is_kept_of_prompts_that_are_through():
    waiting = Waiting()
    await waiting.add(sample("a", 0))
    waiting.ran("a", 1.0)
    await waiting.call(1)
    waiting.ran("b", 1.0)
    waiting.queue.call_next()
    assert (waiting.queue._samples, waiting.queue._waiting) == ({}, {})


def test_a_long_tailed_batch_over_four_replicas_takes_three_quarters_of_a_static_split(monkeypatch: pytest.MonkeyPatch):
    """Latency and clock are simulated, so the figure is that of the order alone; order of arrival makes it 0.89."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import bench_routing

    loop = bench_routing.SimulatedClock()
    prompts, samples, ratios = 64, 8, []
    for seed in range(20):
        batch = bench_routing.lengths(prompts, samples, seed)
        routed, split, _ = loop.run_until_complete(bench_routing.measured(batch, samples, replicas=4, slots=8))
        assert routed >= max(*batch, sum(batch) / 32) * bench_routing.TOKEN_SECONDS * 0.999
        ratios.append(routed / split)
    loop.close()
    assert statistics.median(ratios) <= 0.75
