"""When a call of a reward function may begin: how many run at once, and how many begin in a minute.

A run calls its function in one process: the controller, or with ``reward.while_sampling`` the one that holds the
sampling service. `gate_of` gives all scorers of a process one gate: its limits are those of the run. Calls that run in
child processes pass the gate in their parent.
"""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from verl.outcomes import on_error


class CallGate:
    """Lets calls begin in order of arrival, evenly spaced. Safe between threads and event loops.

    Args:
        at_once: most calls that run; None: no limit.
        per_minute: most calls that begin in a minute; None: no limit.
        clock: seconds.
    """

    def __init__(
        self,
        at_once: int | None = None,
        per_minute: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.is_open = at_once is None and per_minute is None
        self._interval = 0.0 if per_minute is None else 60.0 / per_minute
        # Threads and event loops that call; held for a change of the fields below, never while waiting.
        self._lock, self._clock, self._free_at = threading.Lock(), clock, 0.0
        self._free, self._waiting = at_once, deque[Future[None]]()

    def place(self) -> CallPlace:
        """Queue up for a call."""
        return CallPlace(self, LET_IN if self._free is None else self._queue())

    @contextmanager
    def passed(self) -> Iterator[None]:
        """Block this thread until the call in the block may begin."""
        place = self.place()
        try:
            place.wait()
            yield
        finally:
            place.free()

    def reserve(self) -> float:
        """Take the next time at which a call may begin; the seconds until then."""
        if not self._interval:
            return 0.0
        with self._lock:
            now = self._clock()
            at = max(now, self._free_at)
            self._free_at = at + self._interval
            return at - now

    def _queue(self) -> Future[None]:
        granted: Future[None] = Future()
        with self._lock:
            if not self._free:
                self._waiting.append(granted)
                return granted
            self._free -= 1
        granted.set_result(None)
        return granted

    def release(self) -> None:
        """Let the next call in; only `CallPlace` calls this."""
        with self._lock:
            while self._waiting:
                following = self._waiting.popleft()
                if following.set_running_or_notify_cancel():
                    following.set_result(None)
                    return
            if self._free is not None:
                self._free += 1


class CallPlace:
    """The place of one call in the queue, and while it runs."""

    def __init__(self, gate: CallGate, granted: Future[None]):
        self._gate, self._granted = gate, granted
        self._once = deque([None])  # popped by the one thread that frees the place

    def wait(self) -> None:
        """Block until the call may begin."""
        with on_error(lambda _: self.free()):
            self._granted.result()
            if seconds := self._gate.reserve():
                time.sleep(seconds)

    async def reached(self) -> None:
        """Wait until the call may begin, without blocking the event loop."""
        with on_error(lambda _: self.free()):
            await asyncio.wrap_future(self._granted)
            if seconds := self._gate.reserve():
                await asyncio.sleep(seconds)

    def free(self) -> None:
        """The call has ended, or is given up; a further time changes nothing."""
        try:
            self._once.pop()
        except IndexError:
            return
        if not self._granted.cancel():
            self._gate.release()


LET_IN: Future[None] = Future()
LET_IN.set_result(None)
OPEN = CallGate()


@functools.cache
def gate_of(at_once: int | None, per_minute: float | None) -> CallGate:
    """The gate with these limits that all scorers of this process share."""
    return CallGate(at_once, per_minute)
