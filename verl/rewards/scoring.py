"""Scores samples with a reward function: chooses where it runs, keeps its time limit, and finds the rows at fault."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Literal, get_args

from verl.errors import ConfigError, RewardError, suggest
from verl.metrics import notice
from verl.rewards.forms import Form
from verl.rewards.function import RewardFunction
from verl.rewards.invoke import invoke, invoke_async
from verl.rewards.runners import BuiltinRunner, InlineRunner, LoopRunner, ProcessRunner, Runner, ThreadRunner
from verl.rewards.runners.loop import MOST_AT_ONCE
from verl.rewards.samples import RewardResult, RewardSample, zeroed
from verl.rewards.wire import NotPlainError

Isolation = Literal["auto", "process", "thread", "none"]
OnError = Literal["mask", "raise", "zero"]

SAMPLE_TIMEOUT = 30.0
BATCH_TIMEOUT = 300.0
SLOW_BATCH = 20.0
"""Seconds of scoring after sampling from which a notice names the settings that make it faster."""


@dataclass(frozen=True)
class ScoringLimits:
    """How reward functions are run and what happens when one fails."""

    timeout: float | None = None
    """Seconds for one call; None means 30 for a function of one answer and 300 for a function of the whole batch."""
    on_error: OnError = "mask"
    """A sample whose call fails. ``mask``: it gets no score and is counted. ``raise``: the run stops. ``zero``: its
    score is 0, and it is counted. A built-in scorer that fails on a text scores it as an empty answer in any case."""
    isolation: Isolation = "auto"
    """``auto``: child processes for functions from files, threads for others, an event loop for async ones, nothing
    for the built-in scorers (threads for those that wait for another process). ``none`` runs everything in place
    without a time limit, for breakpoints."""
    num_workers: int = 8
    """Most processes (never more than cores) or threads."""
    needs_truth: bool = False
    """Whether a row without a ground truth is an error where the function names one."""
    max_per_minute: float | None = None
    """Most calls that begin in a minute, evenly spread; None: no limit. For scorers that ask a service."""

    def __post_init__(self) -> None:
        for key, value, allowed in (
            ("isolation", self.isolation, get_args(Isolation)),
            ("on_error", self.on_error, get_args(OnError)),
        ):
            if value not in allowed:
                raise ConfigError(
                    "unknown value", key=f"reward.{key}", got=value, allowed=allowed, fix=suggest(value, allowed)
                )
        if self.timeout is not None and not self.timeout > 0:
            raise ConfigError("must be positive", key="reward.timeout", got=self.timeout, allowed="seconds, or null")
        if self.max_per_minute is not None and not self.max_per_minute > 0:
            raise ConfigError(
                "must be positive", key="reward.max_per_minute", got=self.max_per_minute, allowed="calls, or null"
            )
        if self.num_workers < 1:
            raise ConfigError("must be at least 1", key="reward.num_workers", got=self.num_workers)


class Pace:
    """Times at which calls may begin: evenly spread, in request order. Safe between threads.

    Args:
        per_minute: most calls; None: no limit.
        clock: seconds.
    """

    def __init__(self, per_minute: float | None, clock: Callable[[], float] = time.monotonic):
        self._interval = 0.0 if per_minute is None else 60.0 / per_minute
        # Threads that score; held while a place is taken, not while it is waited for.
        self._clock, self._lock, self._free_at = clock, threading.Lock(), 0.0

    def reserve(self) -> float:
        """Take the next place; how many seconds to wait until it."""
        if not self._interval:
            return 0.0
        with self._lock:
            now = self._clock()
            at = max(now, self._free_at)
            self._free_at = at + self._interval
            return at - now

    def wait(self) -> None:
        """Take the next place and sleep until it."""
        if seconds := self.reserve():
            time.sleep(seconds)


class Scorer:
    """A reward function ready to score. Safe to use from several threads; its processes start at the first call.

    Example:
        >>> Scorer(load_reward_function("my_reward.py")).score([RewardSample("d", "42", "42")])
    """

    def __init__(self, function: RewardFunction, limits: ScoringLimits | None = None):
        self.function, self.limits = function, limits or ScoringLimits()
        self.timeout = self.limits.timeout or (SAMPLE_TIMEOUT if function.form is Form.SINGLE else BATCH_TIMEOUT)
        self._pace = Pace(self.limits.max_per_minute)
        self._at_once: int | None = None  # calls, where a setting says how many
        self._runner = self._make_runner()
        self._threads: ThreadRunner | None = None  # for rows that cannot be sent to a process

    def score(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        """One result per sample, in order; what the function does wrong is in the results."""
        if not samples:
            return []
        called = self._score_singly if self.function.form is Form.SINGLE else self._score_together
        return [self._settled(sample, result) for sample, result in zip(samples, called(samples), strict=True)]

    async def score_async(self, sample: RewardSample) -> RewardResult:
        """The result of one sample, without blocking the event loop (a batch function gets lists of one)."""
        await asyncio.sleep(self._pace.reserve())
        if isinstance(self._runner, InlineRunner):
            (result,) = await asyncio.to_thread(invoke, self.function, [sample])
        else:
            (result,) = await asyncio.wrap_future(self._submit([sample]))
        return self._settled(sample, result)

    def prepare(self) -> None:
        """Start what would start with the first call."""
        self._runner.prepare()

    def close(self) -> None:
        """Stop its processes and threads. Happens by itself when the scorer is dropped or Python ends."""
        self._runner.close()
        if self._threads is not None:
            self._threads.close()

    def _settled(self, sample: RewardSample, result: RewardResult) -> RewardResult:
        """The result with a score where a failure is one; a failure of data, settings or a service stays as it is."""
        failure = result.failure
        if failure is None or failure.kind == "start":
            return result
        if not self.function.is_ours:
            return zeroed(result) if self.limits.on_error == "zero" else result
        if failure.kind == "refused":
            return result
        empty = replace(sample, solution_str="")
        result = invoke(self.function, [empty])[0] if self.function.is_builtin else RewardResult(0.0)
        return RewardResult(result.score or 0.0, result.extra, caught=failure)

    def _score_singly(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        """One call for each, as many at once as may run."""
        runner, paced = self._runner, self._paced(samples)
        if isinstance(runner, InlineRunner):  # a future for each would cost more than the scorer itself
            return [invoke(self.function, [sample])[0] for sample in paced]
        if isinstance(runner, BuiltinRunner):
            calls = [self._submit([s]) if runner.waits(s) else invoke(self.function, [s])[0] for s in paced]
            return [call if isinstance(call, RewardResult) else call.result()[0] for call in calls]
        began = time.monotonic()
        waiting = [self._submit([sample]) for sample in paced]
        waiting[-1].result()  # by then most of the others are there, too: this thread is not woken for each of them
        results = [future.result()[0] for future in waiting]
        self._notice_slow(len(samples), time.monotonic() - began)
        return results

    def _notice_slow(self, count: int, seconds: float) -> None:
        """Point to what makes scoring faster, once a batch took long."""
        at_once = self._at_once
        if seconds < SLOW_BATCH or at_once is None or count <= at_once or self.limits.max_per_minute is not None:
            return
        cores = len(os.sched_getaffinity(0))
        more = f"reward.num_workers={min(cores, count)} scores more at once; " if at_once < cores else ""
        notice(
            "reward.num_workers",
            f"scoring {count} samples took {seconds:.0f} s, {at_once} at once on {cores} cores "
            f"({self.function.label}). {more}an async def gets up to {MOST_AT_ONCE} samples at once, and "
            "reward.while_sampling=true scores during sampling.",
        )

    def _paced(self, samples: Sequence[RewardSample]) -> Iterator[RewardSample]:
        """The samples, each as soon as the rate limit allows another call."""
        for sample in samples:
            self._pace.wait()
            yield sample

    def _score_together(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        """One call for all. If it raises, find the rows that raise alone, and score the others together once more."""
        results = self._submit_paced(samples).result()
        failure = results[0].failure
        if failure is None or failure.kind not in ("raised", "refused", "died") or len(samples) == 1:
            return results
        alone: list[RewardResult] = []
        for sample in samples:
            alone += self._submit_paced([sample]).result()
            reason = alone[-1].failure
            if reason is not None and reason.kind in ("timeout", "start"):
                return results  # looking for the row would take a time limit per row
        good = [i for i, result in enumerate(alone) if result.failure is None]
        if not good or len(good) == len(samples):
            return results  # no row is at fault alone: the call as a whole is
        for i, result in zip(good, self._submit_paced([samples[i] for i in good]).result(), strict=True):
            alone[i] = result
        return alone

    def _submit_paced(self, samples: Sequence[RewardSample]) -> Future[list[RewardResult]]:
        self._pace.wait()
        return self._submit(samples)

    def _submit(self, samples: Sequence[RewardSample]) -> Future[list[RewardResult]]:
        try:
            return self._runner.submit(samples)
        except NotPlainError as error:
            why = f"a row holds {error}, which cannot be sent to another one"
            if self.limits.isolation == "process":
                raise RewardError(
                    f"{self.function.label} cannot run in a process of its own: {why}",
                    fix="Use another reward manager than prime, or set isolation=thread.",
                ) from error
            if self._threads is None:
                self._tell_about_threads(why)
                self._threads = ThreadRunner(self.function, self.timeout, self.limits.num_workers)
            return self._threads.submit(samples)

    def _make_runner(self) -> Runner:
        function, isolation, workers = self.function, self.limits.isolation, self.limits.num_workers
        if isolation == "none":
            return InlineRunner(function)
        if isolation in ("auto", "thread") and function.is_builtin:
            return BuiltinRunner(function)
        if function.is_async:
            return LoopRunner(lambda samples: invoke_async(function, samples), self.timeout)
        workers = workers if function.form is Form.SINGLE else 1
        cores = min(workers, len(os.sched_getaffinity(0)))
        self._at_once = cores
        if isolation == "process":
            return ProcessRunner(function, self.timeout, cores)
        if isolation == "auto" and function.is_loaded:
            try:
                return ProcessRunner(function, self.timeout, cores)
            except RewardError as error:
                self._tell_about_threads(error.message)
        self._at_once = workers
        return ThreadRunner(function, self.timeout, workers)

    def _tell_about_threads(self, why: str) -> None:
        notice(
            f"reward function {self.function.label}",
            f"runs in threads of this process: {why}. A call that never gives the interpreter back (a regular "
            "expression without end) cannot be stopped there.",
        )
