"""From Ray's errors to the errors they stand for.

A worker's exception arrives as it was raised, with its traceback as the cause and a note that names the worker. A
worker that died is reported with what its process wrote last.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakValueDictionary

import ray
from ray import cloudpickle
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    GetTimeoutError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    TaskCancelledError,
)

from verl.errors import WorkerError
from verl.single_controller.base import interrupts
from verl.single_controller.base.handle import note_origin

SETTLE_SECONDS = 1.0
"""After a call failed on one worker, how long the others may take to show that it was one of them that died."""
_HERE = str(Path(__file__).parent)
_MISSING = re.compile("No module named '([^']+)'")
_COLOUR = re.compile("\x1b\\[[0-9;]*m")


class WorkerFailure(Exception):
    """What a worker's process raises: the exception itself, and where and how it came about.

    Args:
        where: worker and method, for instance ``critic[1].update_critic``.
        error: the exception.
        text: its traceback.
    """

    def __init__(self, where: str, error: Exception, text: str):
        super().__init__(where, error, text)
        self.where, self.error, self.text = where, error, text

    def __str__(self) -> str:
        return f"in worker {self.where}\n{self.text}"


class RemoteTraceback(Exception):
    """The traceback in the worker's process, shown as the cause of the exception here."""

    def __init__(self, text: str):
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"in the worker's process:\n{self.text}"


class _DeathReporter(Protocol):
    """What knows the processes of a group."""

    def explain_death(self, actor_id: str, reason: str) -> WorkerError: ...

    def explain_absence(self, actor_id: str, reason: str) -> WorkerError: ...


_death_reporters: WeakValueDictionary[str, _DeathReporter] = WeakValueDictionary()


def register_death_reporter(actor_id: str, reporter: _DeathReporter) -> None:
    """Say who explains the death of an actor."""
    _death_reporters[actor_id] = reporter


@contextmanager
def reported(where: str) -> Iterator[None]:
    """In a worker's process: an exception leaves as a `WorkerFailure`."""
    try:
        yield
    except WorkerFailure:
        raise
    except Exception as error:  # boundary: whatever a worker raises is the controller's to handle
        raise WorkerFailure(where, _portable(error), _traceback_text(error)) from None


def fetch_references(references: list[Any]) -> list[Any]:
    """The values behind Ray's references; the first failure is raised as what it is.

    Raises:
        Interrupted: the interrupt of this thread was set (`interrupts`).
    """
    try:
        return _get(references)
    except RayError as error:
        translated, cause = meaning(_root(references, error))
        raise translated from cause


def _get(references: list[Any]) -> list[Any]:
    interrupt = interrupts.current()
    while interrupt is not None:
        interrupt.check()
        with suppress(GetTimeoutError):  # not yet
            return ray.get(references, timeout=interrupts.CHECK_SECONDS)
    return ray.get(references)


def meaning(error: RayError, with_note: bool = True) -> tuple[BaseException, BaseException | None]:
    """The exception that a Ray error stands for, and the one to raise it from.

    Args:
        with_note: say in a note which worker and method it comes from.
    """
    if isinstance(error, RayTaskError):
        cause = error.cause
        if isinstance(cause, RayError):
            return meaning(cause, with_note)
        if isinstance(cause, WorkerFailure):
            if with_note:
                note_origin(cause.error, cause.where)
            return cause.error, RemoteTraceback(cause.text)
        return cause, RemoteTraceback(_COLOUR.sub("", str(error)))
    if isinstance(error, RayActorError):
        reporter = _death_reporters.get(error.actor_id or "")
        if reporter is None:  # not introduced yet, or another process's
            return _missing_module(error) or WorkerError(f"a worker is gone: {first_sentences(str(error))}"), None
        if isinstance(error, ActorUnavailableError):
            return reporter.explain_absence(str(error.actor_id), str(error)), None
        return reporter.explain_death(str(error.actor_id), str(error)), None
    if isinstance(error, TaskCancelledError):
        return WorkerError("the call was cancelled before it had a result"), None
    if isinstance(error, OutOfMemoryError):
        return WorkerError("a node ran out of memory and Ray stopped a worker", fix=str(error)), None
    if isinstance(error, ObjectLostError):
        return WorkerError("a result is lost, its node or the worker that held it is gone", fix=str(error)), None
    return _missing_module(error) or WorkerError(f"Ray reports {type(error).__name__}: {error}"), None


def _missing_module(error: RayError) -> WorkerError | None:
    match = _MISSING.search(str(error))
    if match is None:
        return None
    return WorkerError(
        f"a worker's process has no module {match.group(1)!r}",
        fix="What is sent to workers must be importable on every node: install the package there, or put its folder on "
        "PYTHONPATH before `ray start`.",
    )


def first_sentences(reason: str) -> str:
    """What Ray says of a death without its identifiers and general advice."""
    if "Worker exit detail: " in reason:
        detail = reason.rpartition("Worker exit detail: ")[2].partition("Some common causes")[0]
    else:
        detail = "\n".join(line for line in reason.splitlines() if not line.startswith("\t")) or reason
    text = " ".join(detail.removeprefix(ActorDiedError.BASE_ERROR_MSG).split())
    return text if text.endswith(".") else f"{text}."


def _root(references: list[Any], error: RayError) -> RayError:
    """Of several failures of a call the one to show: a death, which explains the others, else the lowest rank's."""
    if isinstance(error, RayActorError) or len(references) < 2:
        return error
    ready, _ = ray.wait(list(dict.fromkeys(references)), num_returns=len(set(references)), timeout=SETTLE_SECONDS)
    causes = []
    for reference in references:
        try:
            if reference in ready:
                ray.get(reference)
        except RayActorError as death:
            return death
        except RayError as failure:
            causes.append(failure)
    return causes[0] if causes else error


def _portable(error: Exception) -> Exception:
    """The exception, or one that says the same if its type cannot travel."""
    try:
        # Our own bytes, made on this line: does the exception survive the copy that Ray's transport makes of it?
        cloudpickle.loads(cloudpickle.dumps(error))
    except Exception:  # boundary: a user's exception may fail in any way while it is copied
        return WorkerError(f"{type(error).__module__}.{type(error).__qualname__}: {error}")
    return error


def _traceback_text(error: Exception) -> str:
    """The traceback from the worker's own code on."""
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None and frames.tb_frame.f_code.co_filename.startswith(_HERE):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames)).rstrip()
