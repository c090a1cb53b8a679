"""Errors of the engine, not of the request: another replica may answer it."""

from __future__ import annotations

from verl.errors import RolloutError, WorkerError


class EngineLostError(RolloutError):
    """An engine is dead, does not answer in time, or answers nonsense."""


class EngineSilentError(EngineLostError):
    """An engine did not answer within the time limit of an attempt."""


LOSSES = (EngineLostError, WorkerError, ConnectionError)
"""What a replica raises when it, and not the request, is at fault."""


class EngineBusyError(EngineLostError):
    """An engine asks for a pause.

    Args:
        message: as in every error; ``got`` holds the seconds that it requests, if any.
    """
