"""Scores samples with a reward function: chooses where it runs, keeps its time limit, and finds the rows at fault."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Literal, get_args

from verl.errors import ConfigError, RewardError, suggest
from verl.metrics import notice
from verl.rewards.forms import Form
from verl.rewards.function import RewardFunction
from verl.rewards.gate import CallGate, gate_of
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
    max_concurrent: int | None = None
    """Most calls at once in this process; None: no limit. For functions that query a service, as are the next three."""
    max_rpm: float | None = None
    """Most calls that begin in a minute, evenly spread; None: no limit."""
    max_tpm: float | None = None
    """Most tokens in a minute, with ``estimated_tokens_per_request`` for each call; None: no limit."""
    estimated_tokens_per_request: float = 2000

    def __post_init__(self) -> None:
        for key, value, allowed in (
            ("isolation", self.isolation, get_args(Isolation)),
            ("on_error", self.on_error, get_args(OnError)),
        ):
            if value not in allowed:
                raise ConfigError(
                    "unknown value", key=f"reward.{key}", got=value, allowed=allowed, fix=suggest(value, allowed)
                )
        for key in ("timeout", "max_rpm", "max_tpm", "estimated_tokens_per_request"):
            value = getattr(self, key)
            if value is not None and not value > 0:
                raise ConfigError("must be positive", key=f"reward.{key}", got=value, allowed="above 0")
        for key in ("num_workers", "max_concurrent"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ConfigError("must be at least 1", key=f"reward.{key}", got=value)

    @property
    def gate(self) -> CallGate:
        """Says when a call may begin; the same for all scorers of this process that have these limits."""
        rates = [self.max_rpm, self.max_tpm and self.max_tpm / self.estimated_tokens_per_request]
        return gate_of(self.max_concurrent, min((rate for rate in rates if rate is not None), default=None))


class Scorer:
    """A reward function ready to score. Safe to use from several threads; its processes start at the first call.

    Example:
        >>> Scorer(load_reward_function("my_reward.py")).score([RewardSample("d", "42", "42")])
    """

    def __init__(self, function: RewardFunction, limits: ScoringLimits | None = None):
        self.function, self.limits = function, limits or ScoringLimits()
        self.timeout = self.limits.timeout or (SAMPLE_TIMEOUT if function.form is Form.SINGLE else BATCH_TIMEOUT)
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
        runner = self._runner
        if isinstance(runner, InlineRunner) or (isinstance(runner, BuiltinRunner) and not runner.waits(sample)):
            place = self.limits.gate.place()
            try:
                await place.reached()
                (result,) = await asyncio.to_thread(invoke, self.function, [sample])
            finally:
                place.free()
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
        runner = self._runner
        if isinstance(runner, InlineRunner):  # a future for each would cost more than the scorer itself
            return [runner.call([sample])[0] for sample in samples]
        if isinstance(runner, BuiltinRunner):
            calls = [self._submit([s]) if runner.waits(s) else runner.call([s])[0] for s in samples]
            return [call if isinstance(call, RewardResult) else call.result()[0] for call in calls]
        began = time.monotonic()
        waiting = [self._submit([sample]) for sample in samples]
        waiting[-1].result()  # by then most of the others are there, too: this thread is not woken for each of them
        results = [future.result()[0] for future in waiting]
        self._notice_slow(len(samples), time.monotonic() - began)
        return results

    def _notice_slow(self, count: int, seconds: float) -> None:
        """Point to what makes scoring faster, once a batch took long."""
        at_once = self._at_once
        if seconds < SLOW_BATCH or at_once is None or count <= at_once or not self.limits.gate.is_open:
            return
        cores = len(os.sched_getaffinity(0))
        more = f"reward.num_workers={min(cores, count)} scores more at once; " if at_once < cores else ""
        notice(
            "reward.num_workers",
            f"scoring {count} samples took {seconds:.0f} s, {at_once} at once on {cores} cores "
            f"({self.function.label}). {more}an async def gets up to {MOST_AT_ONCE} samples at once, and "
            "reward.while_sampling=true scores during sampling.",
        )

    def _score_together(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        """One call for all. If it raises, find the rows that raise alone, and score the others together once more."""
        results = self._submit(samples).result()
        failure = results[0].failure
        if failure is None or failure.kind not in ("raised", "refused", "died") or len(samples) == 1:
            return results
        alone: list[RewardResult] = []
        for sample in samples:
            alone += self._submit([sample]).result()
            reason = alone[-1].failure
            if reason is not None and reason.kind in ("timeout", "start"):
                return results  # looking for the row would take a time limit per row
        good = [i for i, result in enumerate(alone) if result.failure is None]
        if not good or len(good) == len(samples):
            return results  # no row is at fault alone: the call as a whole is
        for i, result in zip(good, self._submit([samples[i] for i in good]).result(), strict=True):
            alone[i] = result
        return alone

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
                self._threads = ThreadRunner(self.function, self.timeout, self.limits.num_workers, self.limits.gate)
            return self._threads.submit(samples)

    def _make_runner(self) -> Runner:
        function, isolation, workers = self.function, self.limits.isolation, self.limits.num_workers
        gate = self.limits.gate
        if isolation == "none":
            return InlineRunner(function, gate)
        if isolation in ("auto", "thread") and function.is_builtin:
            return BuiltinRunner(function, gate)
        if function.is_async and isolation != "process":
            return LoopRunner(lambda samples: invoke_async(function, samples), self.timeout, gate)
        workers = workers if function.form is Form.SINGLE else 1
        cores = min(workers, len(os.sched_getaffinity(0)))
        self._at_once = cores
        if isolation == "process":
            return ProcessRunner(function, self.timeout, cores, gate=gate)
        if isolation == "auto" and function.is_loaded:
            try:
                return ProcessRunner(function, self.timeout, cores, gate=gate)
            except RewardError as error:
                self._tell_about_threads(error.message)
        self._at_once = workers
        return ThreadRunner(function, self.timeout, workers, gate)

    def _tell_about_threads(self, why: str) -> None:
        notice(
            f"reward function {self.function.label}",
            f"runs in threads of this process: {why}. A call that never gives the interpreter back (a regular "
            "expression without end) cannot be stopped there.",
        )
