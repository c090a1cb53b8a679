"""Who runs the programs that a model wrote: the sandbox of this machine, or a service. Nothing runs in this process."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, Protocol

from verl.sandbox import Limits, Outcome, RemoteSandbox, check, default_pool

MEMORY_MB = 1024
OUTPUT_KB = 1024
CHECK_SECONDS = 10.0
NOT_COMPILED = ("SyntaxError:", "IndentationError:", "TabError:")


class CodeRunner(Protocol):
    """Runs programs outside this process. Called from several threads."""

    def run(self, code: str, stdin: str, seconds: float) -> Outcome:
        """How a program ended. Raises `SandboxError` where none could be run, for which the program is not to blame."""


class Sandbox:
    """A sandbox with the limits that scorers of programs have.

    Args:
        place: the pool of this machine or a `RemoteSandbox`.
        memory_mb: memory of one program.
        places: held while a program runs.
    """

    def __init__(self, place: Any, memory_mb: int | None = None, places: AbstractContextManager[Any] | None = None):
        self._place, self._memory_mb, self._places = place, memory_mb or MEMORY_MB, places or nullcontext()

    def run(self, code: str, stdin: str, seconds: float) -> Outcome:
        """Run a program; raises `SandboxError` where that could not be done."""
        with self._places:
            return self._place.run(code, stdin, Limits(seconds, self._memory_mb, output_kb=OUTPUT_KB))

    def check(self) -> None:
        """Run a right program and a wrong one, to report trouble before a run and not in the middle of it.

        Raises `SandboxError` unless they come out right and wrong.
        """
        check(lambda code, stdin: self.run(code, stdin, CHECK_SECONDS))


def code_runner(
    url: str | None = None,
    max_concurrent: int = 64,
    memory_limit_mb: int | None = None,
    places: Any = None,
    allow_missing: Sequence[str] = (),
) -> Sandbox:
    """What runs programs: the service at ``url``, else the sandbox of this machine.

    Args:
        max_concurrent: most programs at the service at once, over everything in this process that names it.
        places: a semaphore of the caller's, held in addition.
        allow_missing: layers that the sandbox of this machine may lack, see `verl.sandbox.LAYERS`.
    """
    place = _service(url, max_concurrent) if url else default_pool(allow_missing)
    return Sandbox(place, memory_limit_mb, places)


@lru_cache(maxsize=16)
def _service(url: str, max_concurrent: int) -> RemoteSandbox:
    return RemoteSandbox(url, max_concurrent)


def does_not_compile(outcome: Outcome) -> bool:
    """Whether a program ended because it is no Python at all, so that running it on another test is of no use."""
    last = outcome.stderr.strip().rpartition("\n")[2]
    broken = last.startswith(NOT_COMPILED) and "Traceback" not in outcome.stderr
    return outcome.status == "error" and (broken or outcome.detail == "it does not compile")
