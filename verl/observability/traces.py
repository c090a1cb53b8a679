"""Traces of rollouts: each conversation with its calls, for a tool that shows them.

A trace is recorded in memory while it happens, and a thread of its own writes it once it has ended. So no call waits
for a tracker, only the end of its trajectory, and a tracker that fails ends nothing: it is off from then on, with one
notice. Where nothing is recorded, a call costs the reading of one variable.
"""

from __future__ import annotations

import asyncio
import atexit
import queue
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from verl.errors import ConfigError, suggest
from verl.metrics import notice
from verl.observability.traced_call import KEY, TraceBackend, TracedCall, plain_dict
from verl.observability.tracker import tracker_boundary
from verl.outcomes import on_error

BACKENDS = ("mlflow", "weave", "trackio")
PATIENCE = 60.0
"""Seconds without one written trace after which a tracker counts as failed."""
AT_THE_END = 10.0
"""Seconds that a process waits at its end for what is not written yet."""


class Traces:
    """Where the traces of this process go.

    Args:
        name: of the backend; ``token2text`` adds the text of tokens.
        most: prompts per step whose samples are recorded; None: all.
    """

    def __init__(self, name: str, backend: TraceBackend, token2text: bool = False, most: int | None = None):
        self.name, self.backend, self.token2text, self.most = name, backend, token2text, most
        self.is_off = False
        self._queue: queue.SimpleQueue[tuple[TracedCall, Future[None]]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._written = 0
        self._last: Future[None] = Future()
        self._last.set_result(None)

    def put(self, trace: TracedCall) -> None:
        """Have a trace written."""
        if self.is_off:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="traces", daemon=True)
            self._thread.start()
            atexit.register(self.close)
        self._last = Future()
        self._queue.put((trace, self._last))

    def flush(self, seconds: float = AT_THE_END) -> None:
        """Wait until everything that was put is written, at most so long."""
        try:
            self._last.result(0 if self.is_off else seconds)
        except FutureTimeout:
            if not self.is_off:
                notice(KEY, f"not every trace was written within {seconds:g} seconds of the end")

    def close(self) -> None:
        """Write what there is; nothing follows."""
        self.flush()
        with tracker_boundary(lambda error: self._switch_off(f"{type(error).__name__}: {error}")):
            if not self.is_off and self._last.done():
                self.backend.close()

    async def settled(self) -> None:
        """Wait until what was put so far is written; one that hangs switches the tool off."""
        waited = asyncio.wrap_future(self._last)
        while not waited.done() and not self.is_off:
            before = self._written
            await asyncio.wait({waited}, timeout=PATIENCE)
            if not waited.done() and self._written == before:
                self._switch_off(f"it took no trace within {PATIENCE:g} seconds")

    def _work(self) -> None:
        while True:
            trace, future = self._queue.get()
            with tracker_boundary(lambda error: self._switch_off(f"{type(error).__name__}: {error}")):
                if not self.is_off:
                    self.backend.write(trace)
            self._written += 1
            future.set_result(None)

    def _switch_off(self, reason: str) -> None:
        self.is_off = True
        notice(f"{KEY}={self.name}", f"failed and is off from now on ({reason}); the run continues without traces")


_active: Traces | None = None
_here: ContextVar[TracedCall | None] = ContextVar("traced_call", default=None)
_left_out: ContextVar[bool] = ContextVar("traces_left_out", default=False)


def active() -> Traces | None:
    """The traces of this process; None: nothing is recorded."""
    return None if _active is None or _active.is_off else _active


def start_traces(
    backend: str, project: str | None, experiment: str | None, token2text: bool = False, most: int | None = None
) -> Traces:
    """Record traces in this process from now on; the same settings again reuse what is running, unless it failed.

    Raises:
        ConfigError: an unknown backend.
        MissingDependencyError: its package is not installed.
    """
    global _active
    names = (backend, project or "verl", experiment or "rollouts")
    running = _active
    if running is not None and not running.is_off:
        if (running.name, running.backend.project, running.backend.experiment) == names:
            running.token2text, running.most = token2text, most
            return running
        running.close()
    _active = Traces(backend, _backend(*names), token2text, most)
    return _active


def stop_traces() -> None:
    """Write what there is, and record nothing from now on."""
    global _active
    if _active is not None:
        _active.close()
    _active = None


@contextmanager
def trace(
    name: str, inputs: Mapping[str, Any], attributes: Mapping[str, Any], kind: str = "agent"
) -> Iterator[TracedCall | None]:
    """What runs inside is one trace, which is put where it ends; None where nothing is recorded.

    Inside another trace it is a call of that one.
    """
    traces = active()
    if traces is None or _left_out.get():
        yield None
        return
    if _here.get() is not None:
        with traced(name, kind, inputs) as call:
            if call is not None:
                call.attributes = plain_dict(attributes)
            yield call
        return
    labels = {"experiment_name": traces.backend.experiment, **attributes}
    root = TracedCall(name, kind, plain_dict(inputs), time.time_ns(), attributes=plain_dict(labels))
    try:
        with _inside(root):
            yield root
    finally:
        traces.put(root)


@contextmanager
def traced(name: str, kind: str, inputs: Mapping[str, Any]) -> Iterator[TracedCall | None]:
    """What runs inside is a call of the trace that is being recorded; None where there is none."""
    parent = _here.get()
    if parent is None:
        yield None
        return
    call = TracedCall(name, kind, plain_dict(inputs), time.time_ns())
    parent.calls.append(call)
    with _inside(call):
        yield call


@contextmanager
def left_out() -> Iterator[None]:
    """Nothing that runs inside is recorded."""
    token, outer = _left_out.set(True), _here.set(None)
    try:
        yield
    finally:
        _here.reset(outer)
        _left_out.reset(token)


@contextmanager
def _inside(call: TracedCall) -> Iterator[None]:
    token = _here.set(call)
    try:
        with on_error(call.fails):
            yield
    finally:
        call.end = time.time_ns()
        _here.reset(token)


def _backend(name: str, project: str, experiment: str) -> TraceBackend:
    if name == "mlflow":
        from verl.observability.backends.mlflow_traces import MlflowTraces

        return MlflowTraces(project, experiment)
    if name == "weave":
        from verl.observability.backends.weave_traces import WeaveTraces

        return WeaveTraces(project, experiment)
    if name == "trackio":
        from verl.observability.backends.trackio_traces import TrackioTraces

        return TrackioTraces(project, experiment)
    raise ConfigError("no such backend", key=KEY, got=name, allowed=BACKENDS, fix=suggest(name, BACKENDS))
