"""How every program ends: a user's error is one message and exit status 2, Ctrl-C outside of training one and 130."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from typing import Any

from verl.errors import NotBuiltError, VerlError, hide_in_text, printable
from verl.terminal import tell


def run_program(work: Callable[[], Any]) -> int:
    """Do the work of a program; returns the exit status."""
    try:
        work()
    except VerlError as error:
        return report_error(error)
    except KeyboardInterrupt:
        return interrupted()
    return 0


def interrupted() -> int:
    """What a program says that Ctrl-C ends while no step is in work; returns the exit status."""
    tell("SIGINT: the program ends outside of a training step; what is saved is untouched")
    return 128 + signal.SIGINT


def report_error(error: VerlError) -> int:
    """Print the message, the worker that it comes from, and its causes; returns the exit status."""
    print(f"error: {error}", file=sys.stderr)
    for note in getattr(error, "__notes__", ()):
        print(printable(hide_in_text(f"  {note}")), file=sys.stderr)
    if error.__cause__ is not None:
        cause = f"  caused by {type(error.__cause__).__name__}: {error.__cause__}"
        print(printable(hide_in_text(cause)), file=sys.stderr)
    return 2


def not_built(program: str, feature: str, fix: str = "Start verl.trainer.main_ppo.") -> int:
    """What a program of upstream says that does not exist here, whatever its words; returns the exit status."""
    return report_error(NotBuiltError(f"not built yet: {feature}", key=f"python -m {program}", fix=fix))
