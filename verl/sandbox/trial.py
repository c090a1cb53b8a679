"""Whether a place that runs programs does so: a right one has to come out right, and a wrong one wrong."""

from __future__ import annotations

from collections.abc import Callable

from verl.errors import SandboxError
from verl.sandbox.outcome import Outcome

QUESTION, ANSWER = "7\n", "42"
RIGHT = "print(int(input()) * 6)"
WRONG = "print(int(input()) * 6)\nraise SystemExit(3)"


def check(run: Callable[[str, str], Outcome]) -> None:
    """Try a place before a run relies on it.

    Args:
        run: runs a program with a standard input.

    Raises:
        SandboxError: no program could be run, or the outcome of one is not what it has to be.
    """
    right = run(RIGHT, QUESTION)
    if right.status != "ok" or right.stdout.strip() != ANSWER:
        raise _refusal("a right program comes out wrong", right)
    wrong = run(WRONG, QUESTION)
    if wrong.status != "error":
        raise _refusal("a program that ends with exit code 3 comes out right", wrong)


def _refusal(problem: str, outcome: Outcome) -> SandboxError:
    return SandboxError(
        f"the sandbox does not judge programs as it must: {problem}",
        got=f"{outcome.status}, {outcome.describe()[-500:]!r}",
        fix="Nothing is scored like this. Check the limits (memory, time) and the machine, or name another sandbox "
        "(sandbox_fusion url).",
    )
