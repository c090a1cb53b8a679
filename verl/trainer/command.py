"""How every program reports a user's error: one message, and exit status 2."""

from __future__ import annotations

import sys

from verl.errors import NotBuiltError, VerlError, hide_in_text, printable


def report(error: VerlError) -> int:
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
    return report(NotBuiltError(f"not built yet: {feature}", key=f"python -m {program}", fix=fix))
