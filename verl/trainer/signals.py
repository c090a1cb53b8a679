"""SIGTERM, SIGINT and SIGHUP during a run: the first one ends it in order, the second one at once.

A scheduler that takes a machine back sends SIGTERM and waits for a while; a user presses Ctrl-C; a terminal hangs up.
In each case the run saves what it has and leaves with status 128 + signal (143, 130, 129), so that a script can tell it
from a run that is complete (0) and start it again. Handlers are in place only while a loop runs.

Python runs a handler only between two instructions of the main thread, which may be deep inside a kernel, a collective
or a call of a worker. A thread therefore listens, too, and it is the thread that answers and that leaves.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any

import psutil

from verl.checkpoint.deadly import forget_reading
from verl.terminal import tell

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class StepDropped(KeyboardInterrupt):
    """Raised inside `StopSignals.droppable`: the work in progress is dropped."""


class Hung(KeyboardInterrupt):
    """Raised in the main thread of a run that hangs; no reward function or agent loop takes it for its own error."""


class RunStopped(SystemExit):
    """A run has ended in order because of a signal; ends the program with status 128 + signal.

    Args:
        number: the signal.
        sentence: what was saved, for the user.
    """

    def __init__(self, number: signal.Signals, sentence: str):
        super().__init__(128 + number)
        self.signal, self.sentence = number, sentence


class StopSignals:
    """Watches for `SIGNALS` while its block runs, in the main thread only; under ``nohup`` SIGHUP stays ignored.

    Args:
        drop_at_once: leave a `droppable` block at the moment of the signal; else at its end (workers in other
            processes would continue their calls).

    Example:
        >>> with StopSignals() as stop:
        ...     while not stop.requested: train_a_step()
    """

    def __init__(self, drop_at_once: bool = True):
        self.drop_at_once = drop_at_once
        self.signal: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._wakeup = (-1, -1, -1)
        self._droppable = False

    @property
    def requested(self) -> bool:
        """Whether a signal has come."""
        return self.signal is not None

    @contextmanager
    def droppable(self) -> Iterator[None]:
        """Work that a signal ends with `StepDropped`, because nothing that is saved depends on it."""
        if self.requested:
            raise StepDropped
        self._droppable = True
        try:
            yield
        finally:
            self._droppable = False
        if self.requested:
            raise StepDropped

    def stopped(self, sentence: str, says: bool = True) -> RunStopped:
        """The exception that ends the run, after the message to the user.

        One of several processes may end because another one got the signal; it ends as after SIGTERM.
        """
        received = self.signal or signal.SIGTERM
        if says:
            tell(f"{received.name}: {sentence}")
        return RunStopped(received, sentence)

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            reader, writer = os.pipe()
            os.set_blocking(writer, False)
            self._wakeup = (reader, writer, signal.set_wakeup_fd(writer, warn_on_full_buffer=False))
            self._listener = threading.Thread(target=self._listen, args=(reader,), name="verl-signals", daemon=True)
            self._listener.start()
            for number in SIGNALS:
                if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                    continue
                self._before[number] = signal.signal(number, self._receive)
            _watching.append(self)
            logging.getLogger("asyncio").addFilter(_is_news)  # for good: tasks may go at the end of the program
            self._before_unraisable, sys.unraisablehook = sys.unraisablehook, self._unraisable
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if self._before:
            self._before.clear()
            _watching.remove(self)
            sys.unraisablehook = self._before_unraisable
            signal.set_wakeup_fd(self._wakeup[2])
            os.close(self._wakeup[1])  # the thread sees the end of the pipe and closes its side
            self._listener.join(1.0)  # a thread still running at interpreter exit may abort the process

    def leave_to_parent(self) -> None:
        """In a forked child (a loader's worker): the parent answers signals, and its pipe is not the child's.

        SIGTERM ends a child as usual; what a terminal sends reaches it too, and must not: the parent still needs it.
        """
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        for descriptor in self._wakeup[:2]:
            os.close(descriptor)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or signal.Signals(number)
        if self._droppable and self.drop_at_once:
            self._droppable = False
            raise StepDropped

    def _unraisable(self, event: sys.UnraisableHookArgs) -> None:
        """A signal in a finalizer, where Python continues after an exception: the end of the block raises it."""
        if not isinstance(event.exc_value, StepDropped):
            self._before_unraisable(event)

    def _listen(self, reader: int) -> None:
        """Answer every signal at once; exit at the second one, whatever the main thread is doing.

        A terminal that hangs up insists on nothing: its shell and the kernel send a SIGHUP each, a login session may
        send SIGTERM with it, and the run still saves.
        """
        seen: list[signal.Signals] = []
        while numbers := os.read(reader, 1):
            if numbers[0] not in SIGNALS or (seen and numbers[0] == signal.SIGHUP):
                continue
            received = signal.Signals(numbers[0])
            if seen and seen[-1] != signal.SIGHUP:
                tell(f"{received.name}, the second signal: leaving at once; finished checkpoints are untouched")
                try:
                    kill_descendants()
                finally:
                    os._exit(128 + received)  # nothing may delay it, not even clean-up; the kernel drops the lock
            for note in _first_notes if not seen else ():
                note(received)
            seen.append(received)
            self.signal = self.signal or received
            tell(f"{received.name}: the run saves and stops; a second signal ends it at once")
        os.close(reader)


_watching: list[StopSignals] = []
_first_notes: list[Callable[[signal.Signals], object]] = [lambda _: forget_reading()]


def on_first(note: Callable[[signal.Signals], object]) -> None:
    """Call ``note`` with the first signal that a `StopSignals` of this process hears."""
    _first_notes.append(note)


def _is_news(record: logging.LogRecord) -> bool:
    """Not where a task of an event loop reports, as it goes, the interrupt that has left its loop long before."""
    return not (record.exc_info and isinstance(record.exc_info[1], StepDropped | Hung))


def _after_fork() -> None:
    for stop in _watching:
        stop.leave_to_parent()
    _watching.clear()


os.register_at_fork(after_in_child=_after_fork)


def kill_descendants() -> None:
    """End all descendants of this process: loader and reward processes, a cluster that it started.

    They would notice eventually that their parent is dead; Ray's agents take minutes on a busy machine.
    """
    with suppress(psutil.Error, OSError):  # they cannot be listed
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):  # it has ended meanwhile
                process.kill()
