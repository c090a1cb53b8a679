r"""The package ``math-verify`` as a scorer: it reads LaTeX and compares formulas, sets, intervals and matrices.

It runs in a process that is sealed (no programs, files to write, connections) and killed when it takes too long or
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
from verl.rewards.scorers.text import MENTION, text_of
from verl.rewards.undecided import undecided

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
_NUMBER = (
    r"(?:\\[dt]?binom\{[0-9]{1,4}\}\{[0-9]{1,4}\}|[0-9]{1,3}!|[0-9]{1,4}\^(?:[0-9]|\{-?[0-9]{1,3}\})"
    r"|[0-9]{1,20}(?:\.[0-9]{1,20})?)"
)
ARITHMETIC = re.compile(rf"\s*-?{_NUMBER}(?:\s*(?:[-+*/]|\\cdot|\\times)\s*{_NUMBER})*\s*")
"""What is cheap all the same: sums and products of powers, factorials and binomials of small numbers."""
MENTIONED = re.compile(rf"\\boxed\s*\{{{MENTION.pattern}\}}")
FORMULA = re.compile(r"\$([^$]{1,400})\$")
_lock = threading.Lock()  # threads that score: two would start two runners
_runner: Any = None


def compute_score(solution_str: str, ground_truth: object, timeout_score: float = 0.0) -> float:
    """1.0 if the answer is equal to the truth, else 0.0; ``timeout_score`` where that is not decided in time.

    The two are compared as texts first: the last box, without one the last formula. Then math-verify reads the last
    20,000 characters, or the box if it stands before them. An answer that is costly to compute is wrong; `undecided`
    gets the reason.

    Raises:
        MissingDependencyError: the package is not installed.
    """
    text, truth, boxed = (
        MENTIONED.sub("", solution_str[-LONGEST_TEXT:]),
        text_of(ground_truth),
        last_boxed(solution_str),
    )
    formulas = [boxed] if boxed is not None else FORMULA.findall(text)[-1:]
    if formulas and formulas[0].split() == truth.strip().strip("$").split() != []:
        return 1.0
    if boxed is not None and last_boxed(text) is None:
        text = rf"\boxed{{{boxed}}}"
    if _is_costly(text):
        undecided("the answer could take too long to compute")
        return 0.0
    sample = RewardSample(None, text, truth)
    (result,) = _process().submit([sample]).result()
    if result.failure is None:
        return result.score
    if result.failure.kind == "start":
        raise RewardError(f"the process of math-verify did not start: {result.failure.message}")
    undecided(f"math-verify {result.failure.message}")
    return timeout_score if result.failure.kind in ("timeout", "processor time", "died") else 0.0


def _is_costly(text: str) -> bool:
    """Whether the answer in a text is better not read at all."""
    boxed = last_boxed(text)
    answer = text[-LONGEST_ANSWER:] if boxed is None else boxed
    if len(answer) <= LONGEST_ANSWER and ARITHMETIC.fullmatch(answer):
        return False
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
                raise MissingDependencyError(
                    "math-verify is not installed", fix="In the checkout: pip install -e '.[math]'"
                )
            from verl.rewards.function import RewardFunction
            from verl.rewards.runners.process import ProcessRunner
            from verl.rewards.scorers import math_verify_process  # loads the package

            function = RewardFunction.of(math_verify_process.compute_score)
            _runner = ProcessRunner(function, TIMEOUT, PROCESSES, memory_mb=MEMORY_MB)
            atexit.register(_runner.close)
        return _runner
