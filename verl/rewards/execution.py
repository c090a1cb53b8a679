"""Running a program that a model wrote: what goes in and what comes out. Nothing of it runs in this process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

Status = Literal["finished", "failed", "timeout", "not compiled"]


@dataclass(frozen=True)
class Program:
    """One run of a Python program.

    Args:
        code: its source.
        stdin: what it reads.
        seconds: after which it is stopped.
        memory_mb: its memory; None for what the runner has set.
    """

    code: str
    stdin: str = ""
    seconds: float = 5.0
    memory_mb: int | None = None


@dataclass(frozen=True)
class Outcome:
    """How a run ended; ``stdout`` may have been cut by the runner."""

    status: Status
    stdout: str = ""
    stderr: str = ""


class CodeRunner(Protocol):
    """Runs programs apart from this process. Called from several threads.

    Raises:
        RewardError: the runner itself failed (no answer, a layer of the sandbox is missing): the program is not to
            blame, so the sample has no score.
    """

    def run(self, program: Program) -> Outcome: ...

    def check(self) -> None:
        """Find out before a run whether programs can be run at all."""
