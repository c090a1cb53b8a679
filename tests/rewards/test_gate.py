"""Limits on calls of a reward function hold wherever it runs, for all scorers of a process together."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.harness.waiting import wait_until
from tests.rewards.files import Letters, batch, reward_file, samples
from verl.errors import ConfigError
from verl.rewards import RewardFunction, Scorer, ScoringLimits, dispatch, load_reward_function, load_reward_manager
from verl.rewards.early import EarlyScorer
from verl.rewards.gate import CallGate
from verl.rewards.invoke import invoke_async
from verl.rewards.managers.foreign import ForeignManager
from verl.rewards.managers.loop import RewardManagerBase
from verl.rewards.runners import LoopRunner, ThreadRunner
from verl.rewards.runners.base import too_slow
from verl.rewards.samples import all_failed

WAIT = 60.0


class Inside:
    """Counts the calls that run; each stays until two are inside, or for ever where only one may be."""

    def __init__(self, at_once: int = 2):
        self.now, self.most, self.lock = 0, 0, threading.Lock()
        self.meet = threading.Barrier(at_once, timeout=WAIT)

    def __call__(self, solution_str: str, ground_truth: object = None) -> float:
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
        self.meet.wait()
        with self.lock:
            self.now -= 1
        return 1.0


def test_calls_begin_evenly_spaced_by_the_clock():
    now = [100.0]
    gate = CallGate(per_minute=120, clock=lambda: now[0])
    assert [gate.reserve() for _ in range(3)] == [0.0, 0.5, 1.0]
    now[0] = 101.25
    assert gate.reserve() == pytest.approx(0.25, abs=1e-12), "the fourth call may begin at 101.5"
    now[0] = 200.0
    assert gate.reserve() == 0.0
    assert [CallGate().reserve() for _ in range(3)] == [0.0] * 3


def test_the_smaller_of_requests_and_tokens_sets_the_rate():
    by_tokens = ScoringLimits(max_rpm=90, max_tpm=6000, estimated_tokens_per_request=100).gate
    assert by_tokens is ScoringLimits(max_rpm=60).gate, "60 calls of 100 tokens; scorers share the gate of a limit"
    assert ScoringLimits(max_rpm=90, max_tpm=1e6).gate is ScoringLimits(max_rpm=90).gate
    assert ScoringLimits(max_tpm=2000).gate is ScoringLimits(max_rpm=1).gate, "2000 tokens unless it is said"
    assert ScoringLimits().gate.is_open


@pytest.mark.parametrize("kind", ["thread", "built in", "early"])
def test_no_more_calls_run_than_max_concurrent_says(kind, monkeypatch):
    inside = Inside()
    function = RewardFunction.of(inside)
    if kind == "built in":
        monkeypatch.setitem(dispatch.SCORERS, "d", inside)
        monkeypatch.setattr(dispatch, "WAITING", (inside,))
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(8))
        function = RewardFunction.of(dispatch.default_compute_score)
    scorer = Scorer(function, ScoringLimits(max_concurrent=2, num_workers=8))
    if kind == "early":

        async def score_all():
            return await asyncio.gather(*(scorer.score_async(sample) for sample in samples(*"abcdefgh")))

        results = asyncio.run(score_all())
    else:
        results = scorer.score(samples(*"abcdefgh"))
    assert [result.score for result in results] == [1.0] * 8 and inside.most == 2
    scorer.close()


@pytest.mark.parametrize("kind", ["function", "manager"])
def test_no_more_coroutines_run_than_max_concurrent_says(kind):
    now, most, together = [0], [0], asyncio.Barrier(3)

    async def compute_score(solution_str=""):
        now[0] += 1
        most[0] = max(most[0], now[0])
        await together.wait()
        now[0] -= 1
        return 1.0

    class Mine(RewardManagerBase):
        async def run_single(self, data):
            return {"reward_score": await compute_score()}

    limits = ScoringLimits(max_concurrent=3)
    if kind == "function":
        scorer = Scorer(RewardFunction.of(compute_score), limits)
        assert [result.score for result in scorer.score(samples(*"abcdefghi"))] == [1.0] * 9
    else:
        scorer = Mine(None, Letters())
        scorer.configure(limits)
        assert scorer(batch(["a"] * 9, ["x"] * 9))["reward_tensor"].sum() == 9
    assert most == [3]
    scorer.close()


def test_child_processes_share_the_places_of_their_parent(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(4))
    code = f"""
        import os
        from tests.harness.waiting import wait_until

        def count(mark):
            return sum(name.endswith(mark) for name in os.listdir({str(tmp_path)!r}))

        def compute_score(solution_str):
            file = os.path.join({str(tmp_path)!r}, solution_str)
            open(file + ".begun", "w").close()
            wait_until(lambda: count(".begun") >= 2)  # alone, a call would stay for ever
            inside = count(".begun") - count(".ended")
            open(file + ".ended", "w").close()
            return float(inside)
    """
    function = load_reward_function(reward_file(tmp_path, code))
    scorer = Scorer(function, ScoringLimits(max_concurrent=2, num_workers=4, timeout=WAIT))
    assert max(result.score for result in scorer.score(samples(*"abcdefgh"))) == 2.0
    scorer.close()


@pytest.mark.parametrize("kind", ["built in", "inline"])
async def test_a_call_that_waits_for_its_place_leaves_the_loop_free(kind, monkeypatch):
    monkeypatch.setitem(dispatch.SCORERS, "d", lambda solution_str, ground_truth: 1.0)
    function = RewardFunction.of(dispatch.default_compute_score)
    limits = ScoringLimits(max_concurrent=1, max_rpm=6e6, isolation="none" if kind == "inline" else "auto")
    scorer, held = Scorer(function, limits), limits.gate.place()
    await held.reached()
    rescue = threading.Timer(WAIT, held.free)  # for a loop that stands still
    rescue.start()
    scoring = asyncio.ensure_future(scorer.score_async(*samples("a")))
    await asyncio.to_thread(wait_until, lambda: limits.gate._waiting or scoring.done())
    assert not scoring.done() and rescue.is_alive()
    rescue.cancel()
    held.free()
    assert (await scoring).score == 1.0 and limits.gate._free == 1
    scorer.close()


def test_scorers_of_one_run_share_their_places():
    inside, limits = Inside(), ScoringLimits(max_concurrent=2, num_workers=8)
    training, validation = (Scorer(RewardFunction.of(inside), limits) for _ in range(2))
    with ThreadPoolExecutor(2) as both:
        results = list(both.map(lambda scorer: scorer.score(samples(*"abcd")), [training, validation]))
    assert [[one.score for one in each] for each in results] == [[1.0] * 4] * 2 and inside.most == 2
    training.close()
    validation.close()


class Hanging:
    """Scores at once, or for ``bad`` when the test lets it end."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()

    def __call__(self, solution_str: str) -> float:
        if solution_str == "bad":
            self.begun.set()
            self.go_on.wait(WAIT)
        return 1.0


def test_a_call_that_is_given_up_frees_its_place():
    hanging = Hanging()
    runner = ThreadRunner(RewardFunction.of(hanging), None, 2, CallGate(at_once=1))
    bad, good = (runner.submit([sample]) for sample in samples("bad", "good"))
    assert hanging.begun.wait(WAIT) and not good.done()
    runner._pool.give_up_overdue(0.0, lambda calls: all_failed(calls, too_slow(0.0, "here")))
    assert bad.result(WAIT)[0].failure.kind == "timeout" and good.result(WAIT)[0].score == 1.0
    hanging.go_on.set()
    runner.close()


def test_a_coroutine_that_blocks_its_loop_frees_its_place():
    hanging = Hanging()

    async def compute_score(solution_str):
        return hanging(solution_str)

    function = RewardFunction.of(compute_score)
    runner = LoopRunner(lambda calls: invoke_async(function, calls), 10 * WAIT, CallGate(at_once=1))
    bad, good = (runner.submit([sample]) for sample in samples("bad", "good"))
    assert hanging.begun.wait(WAIT) and not good.done()
    runner._state.calls[0].started -= 20 * WAIT  # the clock of the first call
    assert bad.result(WAIT)[0].failure.kind == "timeout" and good.result(WAIT)[0].score == 1.0
    hanging.go_on.set()
    runner.close()


def test_work_that_raises_fails_its_call_and_frees_its_place():
    async def work(calls):
        raise LookupError("no such row")

    runner = LoopRunner(work, WAIT, CallGate(at_once=1))
    calls = [runner.submit([sample]) for sample in samples("a", "b")]
    assert ["no such row" in call.result(WAIT)[0].failure.message for call in calls] == [True, True]
    runner.close()


async def test_a_waiting_call_that_is_cancelled_takes_no_place():
    gate = CallGate(at_once=1)
    first, second, third = gate.place(), gate.place(), gate.place()
    await first.reached()
    begun = asyncio.Event()

    async def reach():
        begun.set()
        await second.reached()

    waiting = asyncio.ensure_future(reach())
    await begun.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    first.free()
    first.free()
    await third.reached()
    assert not gate.place()._granted.done(), "freed twice, it is still one place"


def test_the_rate_limited_manager_makes_one_call_at_a_time(tmp_path):
    config = {"reward": {"reward_manager": {"name": "rate_limited"}, "max_rpm": 6e4}}
    manager = load_reward_manager(config, Letters())
    assert manager.limits.gate is ScoringLimits(max_concurrent=1, max_rpm=6e4).gate
    assert manager(batch(["#### 4", "#### 5"], ["4", "4"]))["reward_tensor"].sum(-1).tolist() == [1.0, 0.0]
    config["reward"]["max_concurrent"] = 5
    assert load_reward_manager(config, Letters()).limits.max_concurrent == 5


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_the_remote_manager_calls_functions_in_other_processes(tmp_path, kind):
    path = reward_file(tmp_path, f"import os\n{kind} compute_score(solution_str): return os.getpid()\n")
    section = {"reward_manager": {"name": "remote"}, "custom_reward_function": {"path": path}, "num_workers": 1}
    manager = load_reward_manager({"reward": section}, Letters())
    (process,) = set(manager(batch(["a", "b"], ["x", "x"]))["reward_tensor"].sum(-1).tolist())
    assert process != float(os.getpid())
    manager.close()


@pytest.mark.parametrize("key", ["max_concurrent", "max_rpm", "max_tpm", "estimated_tokens_per_request"])
def test_limits_of_nothing_are_refused(key):
    with pytest.raises(ConfigError, match=f"reward.{key}"):
        ScoringLimits(**{key: 0})


@pytest.mark.parametrize("kind", ["thread", "inline", "loop", "built in"])
def test_the_rate_limit_holds_for_batches_scored_after_sampling(kind, monkeypatch):
    calls: list[float] = []

    def note(solution_str, ground_truth=None):
        calls.append(time.monotonic())
        return 1.0

    async def note_async(solution_str):
        return note(solution_str)

    function = RewardFunction.of(note_async if kind == "loop" else note)
    if kind == "built in":
        monkeypatch.setitem(dispatch.SCORERS, "d", note)
        function = RewardFunction.of(dispatch.default_compute_score)
    scorer = Scorer(
        function, ScoringLimits(max_rpm=1200, num_workers=4, isolation="none" if kind == "inline" else "auto")
    )
    start = time.monotonic()
    assert [result.score for result in scorer.score(samples(*"abcde"))] == [1.0] * 5
    assert len(calls) == 5 and all(call >= start + 0.05 * i for i, call in enumerate(sorted(calls)))
    scorer.close()


def test_a_call_takes_its_time_when_it_begins(monkeypatch):
    events: list[str] = []
    monkeypatch.setattr(CallGate, "reserve", lambda self: events.append("time") or 0.0)
    scorer = Scorer(RewardFunction.of(lambda solution_str: events.append("call") or 1.0), ScoringLimits(max_rpm=60))
    scorer.score(samples("a"))
    one_by_one = ScoringLimits(max_rpm=60, num_workers=1)
    slow = Scorer(RewardFunction.of(lambda solution_str: events.append("call") or 1.0), one_by_one)
    slow.score(samples(*"abc"))
    assert events == ["time", "call"] * 4, "calls that wait for a thread must not begin together later"
    scorer.close()
    slow.close()


def test_a_batch_call_and_its_repetitions_are_paced(monkeypatch):
    times = []
    monkeypatch.setattr(CallGate, "reserve", lambda self: times.append(1) or 0.0)

    def compute_reward(responses, ground_truths):
        if "bad" in responses:
            raise ValueError("bad row")
        return [1.0] * len(responses)

    scorer = Scorer(RewardFunction.of(compute_reward), ScoringLimits(max_rpm=60))
    assert [r.score for r in scorer.score(samples("a", "bad", "b"))] == [1.0, None, 1.0]
    assert len(times) == 5, "all, each alone, and the good ones together"
    scorer.close()


@pytest.mark.parametrize("kind", ["run_single", "early", "older"])
def test_the_rate_limit_holds_for_managers_of_other_contracts(kind):
    calls: list[float] = []

    class Notes(RewardManagerBase):
        async def run_single(self, data):
            calls.append(time.monotonic())
            return {"reward_score": 1.0}

    def older(data):
        calls.append(time.monotonic())
        return data.batch["responses"].float() * 0

    limits, data = ScoringLimits(max_rpm=1200), batch(["a"] * 4, ["x"] * 4)
    manager = Notes(None, Letters())
    manager.configure(limits)
    start = time.monotonic()
    if kind == "run_single":
        manager(data)
    elif kind == "early":

        async def all_rows():
            await asyncio.gather(*(EarlyScorer(manager).score(data[i : i + 1]) for i in range(4)))

        asyncio.run(all_rows())
    else:
        adopted = ForeignManager(older, limits)
        for i in range(4):
            adopted(data[i : i + 1])
    assert len(calls) == 4 and all(call >= start + 0.05 * i for i, call in enumerate(sorted(calls)))
    manager.close()
