"""The process from which the episodes of a user's environment are forked: ``python host.py PATH``.

It loads the environment's code once, in one thread, and forks two processes for each socket that standard input, a
socket too, brings. The episode makes an environment and answers calls. Its keeper adopts what the episode starts; once
the episode has ended, or nobody holds the other end of its socket, it kills all that is left. The file is run by its
path, since its package imports torch, which would take seconds and 280 MB.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import random
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, NoReturn

from verl import lifeline
from verl.errors import ConfigError, suggest
from verl.outcomes import settle
from verl.registry import load_module, load_object
from verl.rewards import wire
from verl.sandbox import frames

INFO = ("state",)
"""What is read of ``info``; anything else stays in the episode's process."""
PIXELS = ("L", "RGB", "RGBA")
"""Modes of pictures whose arrays are pictures of the same mode again."""
MOST_CHARACTERS = 10_000
"""Of the text of an exception."""
LIBRARY, PYTHON = os.path.dirname(lifeline.__file__), os.path.dirname(os.__file__)


def load_environment(path: str) -> Callable[..., Any]:
    """The class or function at ``file.py:name`` or ``my_pkg.mod:name`` that makes an environment.

    Raises:
        ConfigError: no such file or name.
    """
    file, colon, name = path.rpartition(":")
    if not (colon and file.endswith(".py")):
        environment = load_object(path)
    else:
        members = vars(load_module(file))
        environment = members.get(name)
        if not callable(environment):
            names = [n for n, m in members.items() if n[0] != "_" and callable(m)]
            raise ConfigError(
                f"{file} has no {name!r}",
                key="environment",
                allowed=names or "no class or function is defined there",
                fix=suggest(name, names),
            )
    if not callable(environment):
        raise ConfigError("not callable", key="environment", got=path, allowed="a class or function that makes one")
    return environment


def accepted(function: Callable[..., object], arguments: Mapping[str, object]) -> dict[str, object]:
    """Those of the arguments that the function takes."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {name: value for name, value in arguments.items() if takes_any or name in parameters}


def main(path: str) -> None:
    """Fork episodes until standard input ends."""
    with socket.socket(fileno=os.dup(0)) as control:
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(2, 1)  # what the environment prints must not disturb what the run prints
        loaded: Future[Callable[..., object]] = Future()
        settle(loaded, lambda: load_environment(path))  # the user's file may even call sys.exit
        if (error := loaded.exception()) is not None:
            control.sendall(frames.pack({"failure": _described(error)}))
            return
        make = loaded.result()
        import numpy.random  # noqa: F401 -- 10 ms in each episode otherwise; after the file, which may configure numpy

        control.sendall(frames.pack({"failure": None, "threads": threading.active_count() - 1}))
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel collects keepers
        while (received := socket.recv_fds(control, 1, 1))[0]:
            (link,) = received[1]
            if _fork(link) == 0:
                control.close()
                _keep(make, link)
            os.close(link)


def _fork(link: int) -> int:
    """What `os.fork` returns; -1 where the machine has no further process, which the other end of the link learns."""
    try:
        return os.fork()
    except OSError as error:
        os.write(link, frames.pack({"full": str(error)}))
        return -1


def _keep(make: Callable[..., object], link: int) -> NoReturn:
    """Fork the episode, and end what it leaves behind."""
    lifeline.adopt_orphans()
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    episode = _fork(link)
    if episode == -1:
        os._exit(0)
    if episode == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.close(woken)
        os.close(wake)
        lifeline.die_with_parent()
        os.setsid()  # what a terminal sends is the run's to answer
        _serve(make, link)
    events = select.poll()
    events.register(link, select.POLLRDHUP)
    events.register(woken, select.POLLIN)
    status = None
    while status is None and not any(place == link for place, _ in events.poll()):
        os.read(woken, 1 << 10)
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                status = ended[1] if ended[0] == episode else status
    if status is not None:
        with suppress(OSError):
            os.write(link, frames.pack({"ended": os.waitstatus_to_exitcode(status)}))
    lifeline.end_children()
    os._exit(0)


def _serve(make: Callable[..., object], link: int) -> NoReturn:
    """Answer the calls of one episode."""
    process, episode = os.getpid(), Episode(make)
    try:
        os.write(link, frames.pack({"started": process}))
        for message in frames.read(link):
            answer = episode.answer(message["call"], wire.from_plain(message["with"]))
            if os.getpid() != process:  # a copy that the user's code has forked, and that has returned
                break
            packed = memoryview(answer)
            while packed:
                packed = packed[os.write(link, packed) :]
    except OSError:  # nobody listens any more
        pass
    os._exit(0)


class Episode:
    """A user's environment, in the process of its episode."""

    def __init__(self, make: Callable[..., object]):
        self._make = make
        self._it: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def answer(self, call: str, arguments: Sequence[Any]) -> bytes:
        """A frame with what the call returned, or with what it raised."""
        outcome: Future[object] = Future()
        settle(outcome, lambda: self._result(call, arguments))  # which may even call sys.exit
        if (error := outcome.exception()) is not None:
            return frames.pack({"raised": f"raised {_described(error)}"})
        try:
            return frames.pack({"answer": wire.to_plain(_sendable(outcome.result()))})
        except (wire.NotPlainError, OSError, ValueError, RecursionError) as error:
            return frames.pack({"raised": f"returned what cannot be sent from its process: {error}"})

    def _result(self, call: str, arguments: Sequence[Any]) -> object:
        if call == "make":
            seed, named = arguments
            self._seed_libraries(seed)
            self._it = self._finished(self._make(**named))
            return [
                bool(getattr(self._it, "bounds_its_steps", False)),
                callable(getattr(self._it, "before_reset", None)),
            ]
        if call == "close" and not callable(getattr(self._it, "close", None)):
            return None
        function = getattr(self._it, call)
        if call == "reset":
            return _without_info(self._finished(function(**accepted(function, arguments[0]))))
        return _without_info(self._finished(function(*arguments)))

    def _finished(self, result: object) -> object:
        if not inspect.isawaitable(result):
            return result
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        return self._loop.run_until_complete(result)

    @staticmethod
    def _seed_libraries(seed: int) -> None:
        """Forked processes have equal generators; those of a prompt's episodes shall be equal, no others."""
        random.seed(seed)
        sys.modules["numpy"].random.seed(seed & 0xFFFFFFFF)


def _without_info(result: object) -> object:
    """What ``reset`` and ``step`` return, without what nobody reads."""
    if not isinstance(result, tuple) or not result or not isinstance(result[-1], Mapping) or len(result) < 2:
        return result
    return (*result[:-1], {name: result[-1][name] for name in INFO if name in result[-1]})


def _sendable(value: object) -> object:
    """The same with pictures as arrays of their pixels."""
    if isinstance(value, Mapping):
        return {name: _sendable(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_sendable(item) for item in value]
    if isinstance(value, tuple):
        return tuple(_sendable(item) for item in value)
    if type(value).__module__.partition(".")[0] != "PIL":
        return value
    import numpy as np  # PIL's pictures become arrays by it

    picture: Any = value
    return np.asarray(picture if picture.mode in PIXELS else picture.convert("RGB"))


def _described(error: BaseException) -> str:
    """Its type and text, and the last line of the user's code that it passed through."""
    passed = [(entry.filename, entry.lineno) for entry in traceback.extract_tb(error.__traceback__)]
    users = [(file, line) for file, line in passed if not file.startswith((PYTHON, LIBRARY, "<"))]
    where = " ({}, line {})".format(*users[-1]) if users else ""
    return f"{type(error).__name__}: {str(error)[:MOST_CHARACTERS]}{where}"


if __name__ == "__main__":
    main(*sys.argv[1:])
