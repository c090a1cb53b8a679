r"""Whether two formulas have the same value: ``\frac{\sqrt{8}}{2}`` and ``\sqrt2``, ``(x+1)^2`` and ``x^2+2x+1``.

A process compares them and is killed when it takes too long or too much memory. What runs there (`formulas`) reads
texts with a reader of its own (`expression`), rejects most unequal pairs by their values at fixed points, and lets
sympy prove the rest. What is not proved in time is not equal.
"""

from __future__ import annotations

import atexit
import threading
from functools import lru_cache
from typing import Any

from verl.errors import RewardError
from verl.rewards.samples import RewardSample
from verl.rewards.scorers.expression import TooCostlyError, UnreadableError, parse
from verl.rewards.undecided import undecided

TIMEOUT = 5.0
CPU_SECONDS = 1.0
MEMORY_MB = 1024
PROCESSES = 2
_lock = threading.Lock()  # threads that score: two would start two runners
_runner: Any = None


def equal(first: str, second: str) -> bool:
    """Whether the two are proved equal, by a process that is given `CPU_SECONDS`. Safe to call from any thread."""
    try:
        verdict = decide(first, second)
    except UndecidedError as error:
        verdict = str(error)
    if isinstance(verdict, str):
        undecided(verdict)
    return verdict is True


class UndecidedError(Exception):
    """The process ended for a reason that another try need not meet: a busy machine, another program's memory."""


@lru_cache(maxsize=8192)  # the answers of a group are often the same
def decide(first: str, second: str) -> bool | str:
    """As `equal`, or why no try could decide; raises `UndecidedError`, which is not kept, where a clock ended this."""
    pair = f"{first} and {second}"
    try:
        if parse(first) == parse(second):
            return True
    except TooCostlyError as error:
        return f"{pair}: {error}"
    except UnreadableError:  # decided here, without a process
        return False
    result = _process().submit([RewardSample(None, first, second)]).result()[0]
    failure = result.failure
    if failure is not None and failure.kind == "start":
        raise RewardError(f"the process that compares formulas did not start: {failure.message}")
    if failure is not None and failure.kind in ("timeout", "died"):
        raise UndecidedError(f"{pair}: {failure.message}")
    if failure is not None:
        return f"{pair}: {failure.message}"
    return result.score == 1.0


def start(timeout: float = TIMEOUT) -> Any:
    """Processes that compare formulas; they start with the first pair."""
    from verl.rewards.function import RewardFunction
    from verl.rewards.runners.process import ProcessRunner
    from verl.rewards.scorers.formulas import compute_score  # loads sympy

    return ProcessRunner(RewardFunction.of(compute_score), timeout, PROCESSES, MEMORY_MB, CPU_SECONDS)


def _process() -> Any:
    global _runner
    with _lock:
        if _runner is None:
            _runner = start()
            atexit.register(_runner.close)
        return _runner
