"""Reward functions in child processes: a call that takes too long, crashes or exits costs its process, nothing else."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any

from verl.errors import RewardError
from verl.rewards import wire
from verl.rewards.function import RewardFunction
from verl.rewards.runners.base import Pool, Results, Runner, too_slow
from verl.rewards.samples import RewardFailure, all_failed

START_TIMEOUT = 300.0
TICK = 0.5
EXIT_TIME = 0.2
PIECE = 1 << 20
BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from verl.rewards.worker import main; main()"


class ProcessRunner(Runner):
    """At most ``num_processes`` children, started when calls wait; each call may take ``timeout`` seconds.

    Args:
        memory_mb: the address space of a child. A child with a limit is sealed, too: once the function is loaded it can
            start no program, open no connection and write no file.

    Raises:
        RewardError: another process could not load the function (a lambda, a method, a closure), or could not be sent
            its ``reward_kwargs``.
    """

    def __init__(self, function: RewardFunction, timeout: float, num_processes: int, memory_mb: int | None = None):
        if function.origin is None:
            raise RewardError(
                f"{function.label} cannot run in a process of its own: no file or module holds it under its name",
                fix="Define it at the top level of a file and name that in reward.custom_reward_function.path.",
            )
        try:
            kwargs = wire.to_plain(dict(function.reward_kwargs))
        except wire.NotPlainError as error:
            raise RewardError(
                f"{error} cannot be sent to the process of {function.label}",
                key="reward_kwargs",
                allowed="plain values",
            ) from error
        start = {"origin": function.origin, "name": function.name, "reward_kwargs": kwargs, "timeout": timeout}
        start["memory_mb"] = memory_mb
        broken: list[RewardFailure] = []
        self._pool = Pool(lambda: Child(start, timeout, broken), num_processes)
        weakref.finalize(self, self._pool.close)

    def submit(self, samples: Sequence[Any]) -> Future[Results]:
        """Raises `verl.rewards.wire.NotPlainError` where a row holds something that cannot travel."""
        return self._pool.submit(wire.pack_samples(samples))

    def prepare(self) -> None:
        self._pool.submit([]).result()

    def close(self) -> None:
        self._pool.close()


class Child:
    """One child process: started at the first call, killed and replaced when it fails.

    Args:
        start: what the child needs to load the function.
        broken: shared by all children; holds the failure of the first one that could not load the function, so that
            the others do not try again.
    """

    def __init__(self, start: dict[str, Any], timeout: float, broken: list[RewardFailure]):
        self._start, self._timeout, self._broken = start, timeout, broken
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False

    def handle(self, samples: Sequence[Any]) -> Results:
        """Run one call (packed samples) in the child; without samples, only start it."""
        if not self._broken and self._process is None:
            self._launch()
        if self._broken:
            return all_failed(samples, self._broken[0])
        answer = self._ask(samples, self._timeout) if samples else []
        if isinstance(answer, RewardFailure):
            return all_failed(samples, answer)
        return wire.unpack_results(answer)

    def stop(self) -> None:
        """Kill the child from another thread; its own thread sees the end of the pipe and cleans up."""
        self._stopped = True
        if self._process is not None:
            _kill_group(self._process)

    def close(self) -> None:
        self._end()

    def _launch(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", BOOT, json.dumps([entry or os.getcwd() for entry in sys.path])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # so that whatever the function starts is killed with it
        )
        if self._stopped:
            _kill_group(self._process)
        answer = self._ask(self._start, START_TIMEOUT)
        if isinstance(answer, RewardFailure):
            self._broken.append(RewardFailure("start", f"its process did not start: {answer.message}", answer.trace))
        elif answer["failure"] is not None:
            self._broken.append(replace(wire.unpack_failure(answer["failure"]), kind="start"))

    def _ask(self, message: Any, timeout: float) -> Any:
        """Send one message and wait for its answer; a `RewardFailure` if the process is slow or gone."""
        process = self._process
        if process is None or process.stdin is None:
            return RewardFailure("died", "the reward function was closed")
        try:
            wire.send(process.stdin, message)
            answer = _receive(process, time.monotonic() + timeout)
        except TimeoutError:
            self._end()
            return too_slow(timeout, "and was stopped")
        except OSError:  # the pipe broke
            answer = None
        if answer is not None:
            return answer
        return RewardFailure("died", f"ended its process ({self._end(crashed=True)})")

    def _end(self, crashed: bool = False) -> str:
        """Kill the child with everything that it started; returns how it ended, in words."""
        process, self._process = self._process, None
        if process is None:
            return "it was not running"
        if crashed:
            with suppress(subprocess.TimeoutExpired):  # its exit code is near
                process.wait(EXIT_TIME)
        _kill_group(process)
        process.wait()
        for stream in (process.stdin, process.stdout):
            with suppress(OSError):
                if stream is not None:
                    stream.close()
        return "it was stopped" if self._stopped else _cause(process.returncode)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _receive(process: subprocess.Popen[bytes], deadline: float) -> Any:
    """The child's next message; None when it is gone. Raises TimeoutError at the deadline, even amid a message."""
    assert process.stdout is not None
    pipe, data = process.stdout.fileno(), b""
    while (left := deadline - time.monotonic()) > 0:
        if select.select([pipe], [], [], min(left, TICK))[0]:
            piece = os.read(pipe, PIECE)
            if not piece:
                return None
            data += piece
            message = wire.parse(data)
            if message is not None:
                return message
        elif process.poll() is not None:  # something that the function started may still hold the pipe open
            return None
    raise TimeoutError


def _cause(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with suppress(ValueError):
        return f"signal {-code}, {signal.Signals(-code).name}"
    return f"signal {-code}"
