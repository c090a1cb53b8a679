"""Two halves of two steps at once: one in a thread of its own, the other in the thread that calls.

Consumes: two pieces of work, which share the run and have a context each. Waits for: both. Unblocked by: their ends,
or the first error, which ends the other half where it waits for workers. No thread outlives the call.

What both halves touch: worker groups, whose calls are sent one at a time to all ranks of their processes; notices and
what is worked out once per configuration, where the worst is to do it twice. The prompt source, the stream and the
reward manager belong to the half that collects; trackers, checkpoints and the KL controller to the one that learns.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

from verl.single_controller.base.interrupts import Interrupt, Interrupted, interruptible

A = TypeVar("A")
B = TypeVar("B")


def side_by_side(
    ahead: Callable[[], A], here: Callable[[], B], waiting: AbstractContextManager[None] | None = None
) -> tuple[A, B]:
    """The results of both.

    Args:
        ahead: runs in a thread.
        here: runs in this thread; signals reach it.
        waiting: is entered while this thread waits for the other one.

    Raises:
        BaseException: the first error of the two, as it was raised.
    """
    stop_ahead, stop_here = Interrupt(), Interrupt()
    results: list[A] = []
    errors: list[BaseException] = []

    def run_ahead() -> None:
        try:
            with interruptible(stop_ahead):
                results.append(ahead())
        except Interrupted:
            return  # the error is this thread's caller's
        except BaseException as error:  # carried over to the calling thread
            errors.append(error)
            stop_here.set()

    thread = threading.Thread(target=run_ahead, name="verl-ahead", daemon=True)
    thread.start()
    try:
        with interruptible(stop_here):
            mine = here()
    except Interrupted:
        thread.join()
        raise errors[0] from None
    except BaseException:
        stop_ahead.set()
        thread.join()
        raise
    with waiting or nullcontext():
        thread.join()
    if errors:
        raise errors[0]
    return results[0], mine
