"""What became of a program: how it ended, what it printed, and the verdict, which is formed outside the sandbox."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["ok", "error", "timeout", "memory", "output", "crash"]
"""ok: ended by itself with exit code 0. error: an uncaught exception, a syntax error or another exit code. timeout,
memory, output: it went over that limit. crash: killed by a signal that is not one of the limits'."""

Verdict = Literal["passed", "wrong", "error", "timeout", "memory", "output", "crash"]
"""passed and wrong are said of what a program answered that ended ok; else its status is the verdict."""


@dataclass(frozen=True)
class Outcome:
    """How one program, one case or one cell of a session ended.

    Example:
        >>> default_pool().run("print(6 * 7)").stdout
        '42\\n'
    """

    status: Status
    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = None
    """None where a signal ended it; ``signal`` then says which."""
    signal: int | None = None
    seconds: float = 0.0
    """Wall-clock time of the program itself."""
    cpu_seconds: float = 0.0
    value: Any = None
    """What the function of a `CallCase` returned, as JSON knows it (a tuple is a list)."""
    detail: str = ""
    """One sentence on what went wrong, for a person or for the model; empty where nothing did."""

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    def describe(self) -> str:
        """The text that a model is shown: what was printed, and what went wrong, if anything."""
        parts = [self.stdout, self.stderr]
        if not (self.stderr and self.detail == exit_detail(self.exit_code)):  # the traceback says it better
            parts.append(self.detail)
        return "\n".join(part.rstrip("\n") for part in parts if part)


@dataclass(frozen=True)
class CaseResult:
    """The verdict on one case, and the outcome on which it rests."""

    verdict: Verdict
    outcome: Outcome

    @property
    def passed(self) -> bool:
        return self.verdict == "passed"


def exit_detail(code: int | None) -> str:
    """The sentence on a program that ended with this exit code."""
    return f"ended with exit code {code}"
