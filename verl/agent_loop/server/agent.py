"""Runs a user's agent: each in a thread of its own, so that code which blocks or hangs does not hold up other agents.

The sampler lives in the event loop of the rollout. An agent may be a plain function with the blocking client or a
coroutine function; a coroutine gets an event loop of its own in its thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import numbers
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from verl.errors import ConfigError, suggest
from verl.outcomes import settle
from verl.registry import load_module, load_object
from verl.rewards.runners.thread import interrupt

PARAMETERS = ("base_url", "api_key", "row", "model")
GRACE_SECONDS = 1.0
"""How long a cancelled coroutine may take to clean up."""
USUAL_NAMES = ("agent", "run")


class AgentFailure(Exception):
    """The agent did something wrong; the cause is its own exception, if there is one."""


class AgentTimeoutError(AgentFailure):
    """It took longer than its limit; an error of its own about a time-out is an ordinary failure."""


@dataclass(frozen=True)
class AgentOutcome:
    """What an agent returned: a reward or None, and further values of its row."""

    reward: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)


def load_agent(path: str) -> Callable[..., Any]:
    """The function at ``file.py:name``, ``my_pkg.mod:name``, or the only one in ``file.py``.

    Raises:
        ConfigError: no such file or function, or its parameters are not those of an agent.
    """
    head, colon, name = path.rpartition(":")
    file, name = (head, name) if colon and head.endswith(".py") else (path, "")
    if file.endswith(".py"):
        members = vars(load_module(file))
        agent = members.get(name) if name else next((members[n] for n in USUAL_NAMES if callable(members.get(n))), None)
        if not callable(agent):
            functions = [n for n, m in members.items() if inspect.isfunction(m) and n[0] != "_"]
            raise ConfigError(
                f"{file} has no function {name or 'agent'!r}",
                key="agent",
                got=path,
                allowed=functions or "none found",
                fix=suggest(name or "agent", functions) or "Name it: agent: file.py:my_function.",
            )
    else:
        agent = load_object(path)
    _check(agent, path)
    return agent


def _check(function: Callable[..., Any], path: str) -> None:
    parameters = inspect.signature(function).parameters.values()
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    needed = [p.name for p in parameters if p.default is p.empty and p.name in named and p.name not in PARAMETERS]
    if needed or not (takes_any or {"base_url", "api_key"} <= set(named)):
        raise ConfigError(
            f"{path} is not an agent: its parameters are ({', '.join(named)})",
            key="agent",
            allowed="base_url and api_key, and of row and model what it needs",
            fix="def agent(base_url, api_key, row): ...",
        )


async def run_agent(function: Callable[..., Any], arguments: Mapping[str, Any], timeout: float) -> AgentOutcome:
    """Call the agent with those of ``arguments`` that it takes.

    Raises:
        AgentTimeoutError: it took longer than ``timeout`` seconds.
        AgentFailure: it raised, or returned something that is no reward.
    """
    parameters = inspect.signature(function).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    call = _Call(function, {name: value for name, value in arguments.items() if takes_any or name in parameters})
    try:
        outcome = await asyncio.wait_for(asyncio.wrap_future(call.start()), timeout)
    except TimeoutError as error:
        raise AgentTimeoutError(f"took longer than {timeout:g} s and was given up") from error
    finally:
        call.stop()
    failure = outcome.exception()
    if isinstance(failure, AgentTimeoutError):  # of an agent that keeps its limit itself
        raise failure
    if failure is not None:
        raise AgentFailure(f"{type(failure).__name__}: {failure}") from failure
    return read_outcome(outcome.result())


def read_outcome(returned: object) -> AgentOutcome:
    """A number, a bool, None, or a dict with ``score`` or ``reward`` and further values."""
    extra: dict[str, Any] = {}
    if isinstance(returned, Mapping):
        extra = {str(name): value for name, value in returned.items()}
        scores = [extra.pop(name) for name in ("reward", "score") if name in extra]
        returned = scores[0] if scores else None
    if returned is None:
        return AgentOutcome(None, extra)
    if not isinstance(returned, numbers.Real) or not math.isfinite(returned):
        allowed = "a finite number, None, or a dict with 'score'"
        raise AgentFailure(f"returned {returned!r:.80}, which is no reward: {allowed}")
    return AgentOutcome(float(returned), extra)


class _Call:
    """One call in a daemon thread; its future gets how it ended, a future that is done."""

    def __init__(self, function: Callable[..., Any], arguments: dict[str, Any]):
        self._function, self._arguments = function, arguments
        self._future: Future[Future[Any]] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._thread = threading.Thread(target=self._work, name="verl-agent", daemon=True)

    def start(self) -> Future[Future[Any]]:
        self._future.set_running_or_notify_cancel()  # from here on it cannot be cancelled from outside, only stopped
        self._thread.start()
        return self._future

    def stop(self) -> None:
        """End it if it still runs: its task is cancelled, plain code gets an exception at its next instruction."""
        if self._future.done():
            return
        loop, task = self._loop, self._task
        if loop is None or task is None:
            self._interrupt()
            return
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(task.cancel)
        later = threading.Timer(GRACE_SECONDS, self._interrupt)  # a coroutine that blocks its loop is not cancelled
        later.daemon = True
        later.start()

    def _interrupt(self) -> None:
        if self._thread.ident is not None and not self._future.done():
            interrupt(self._thread.ident)

    def _work(self) -> None:
        outcome: Future[Any] = Future()
        settle(outcome, self._call)  # the user's code may even call sys.exit
        self._future.set_result(outcome)

    def _call(self) -> Any:
        result = self._function(**self._arguments)
        return asyncio.run(self._turn(result)) if inspect.isawaitable(result) else result

    async def _turn(self, work: Any) -> Any:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        return await work
