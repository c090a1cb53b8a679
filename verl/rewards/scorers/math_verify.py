r"""The package ``math-verify`` as a scorer: it reads LaTeX and compares formulas, sets, intervals and matrices.

It is asked in a process that is sealed (no programs, files to write, connections) and killed when it takes too long or
too much memory, and only its reader of LaTeX is used: its reader of plain expressions would evaluate them. No data
source uses it by itself: ``reward.custom_reward_function.path=verl.rewards.scorers.math_verify``.
"""

from __future__ import annotations

import atexit
import importlib.util
import re
import threading
from typing import Any

from verl.errors import MissingDependencyError, RewardError
from verl.rewards.samples import RewardSample
from verl.rewards.scorers.math_boxed import last_boxed
from verl.rewards.scorers.text import text_of

TIMEOUT = 10.0
MEMORY_MB = 1536
PROCESSES = 2
LONGEST_TEXT = 20_000
LONGEST_ANSWER = 400
DEEPEST = 30
COSTLY = re.compile(
    r"\^\s*\{[^{}]*\^|\^\s*[-0-9.(a-z]*\s*\^|\^[0-9{}]*\)\s*\^|\^\{?\(?-?[0-9]{3}|[0-9]{3}\)?!|!\s*!|\\binom"
    r"|[0-9][eE][+-]?[0-9]{3}|-{4}|[0-9]{60}"
)
"""What is costly to compute and no answer to a question: towers of powers, factorials of large numbers."""
_lock = threading.Lock()  # threads that score: two would start two runners
_runner: Any = None


def compute_score(solution_str: str, ground_truth: Any, timeout_score: float = 0.0) -> float:
    """1.0 if the answer is equal to the truth, else 0.0; ``timeout_score`` where that is not decided in time.

    Only the last 20,000 characters of the answer are read, and an answer that is costly to compute is wrong.

    Raises:
        MissingDependencyError: the package is not installed.
    """
    text = solution_str[-LONGEST_TEXT:]
    if _is_costly(text):
        return 0.0
    sample = RewardSample(None, text, text_of(ground_truth))
    (result,) = _process().submit([sample]).result()
    if result.failure is None:
        return result.score
    if result.failure.kind == "start":
        raise RewardError(f"the process of math-verify did not start: {result.failure.message}")
    return timeout_score if result.failure.kind in ("timeout", "processor time", "died") else 0.0


def _is_costly(text: str) -> bool:
    """Whether the answer in a text is better not read at all."""
    boxed = last_boxed(text)
    answer = text[-LONGEST_ANSWER:] if boxed is None else boxed
    depth = deepest = 0
    for sign in answer:
        depth += (sign in "([{") - (sign in ")]}")
        deepest = max(deepest, depth)
    return len(answer) > LONGEST_ANSWER or deepest > DEEPEST or COSTLY.search(answer) is not None


def _process() -> Any:
    global _runner
    with _lock:
        if _runner is None:
            if importlib.util.find_spec("math_verify") is None:
                raise MissingDependencyError("math-verify is not installed", fix="pip install 'verl[math]'")
            from verl.rewards.function import RewardFunction
            from verl.rewards.runners.process import ProcessRunner
            from verl.rewards.scorers import math_verify_process  # loads the package

            function = RewardFunction.of(math_verify_process.compute_score)
            _runner = ProcessRunner(function, TIMEOUT, PROCESSES, memory_mb=MEMORY_MB)
            atexit.register(_runner.close)
        return _runner
