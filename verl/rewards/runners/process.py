"""Reward functions in child processes: a call that takes too long, crashes or exits costs its process, nothing else.

A message costs more than most reward functions. So calls of a function that has shown that it is quick are written
several at once; the child still answers each by itself, and those behind a call that failed its process go to another.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import select
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import IO, Any

from verl import env, lifeline
from verl.errors import RewardError
from verl.metrics import notice
from verl.rewards import wire
from verl.rewards.function import RewardFunction
from verl.rewards.gate import OPEN, CallGate
from verl.rewards.runners.base import Results, Runner, RunnerPool, too_slow
from verl.rewards.samples import RewardFailure
from verl.sandbox import frames

START_TIMEOUT = 300.0
TICK = 0.5
EXIT_TIME = 0.2
PIECE = 1 << 20
MOST_AT_ONCE, MOMENT = 32, 0.02
"""Calls that are sent together, and the seconds that they may take all in all."""
MOST_KILLS = 3
"""Processes that are killed from outside over one call, before the call has failed."""
SMALLEST_PIPE = 16 << 10
NONE_YET = object()
TOO_LONG = RewardFailure(
    "refused", f"the samples of a call have more than the {frames.MAX_REQUEST >> 20} MiB of a message"
)
BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from verl.rewards.worker import main; main()"


class ProcessRunner(Runner):
    """At most ``num_processes`` children, started when calls wait; each call may take ``timeout`` seconds.

    Args:
        memory_mb: the address space of a child. A child with a limit is sealed, too: once the function is loaded it can
            start no program, open no connection, write no file and read none but libraries, and has no variables of the
            shell but harmless ones. One without is the user's own code, and has what this process has.
        cpu_seconds: processor time of one call, whatever else the machine does; ``timeout`` is the time of a clock.

    Raises:
        RewardError: another process could not load the function (a lambda, a method, a closure), or could not be sent
            its ``reward_kwargs``.
    """

    def __init__(
        self,
        function: RewardFunction,
        timeout: float,
        num_processes: int,
        memory_mb: int | None = None,
        cpu_seconds: float | None = None,
        gate: CallGate = OPEN,
    ):
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
        start |= {"memory_mb": memory_mb, "cpu_seconds": cpu_seconds}
        broken: list[RewardFailure] = []
        is_grader = memory_mb is not None
        pool = RunnerPool(
            lambda: Child(start, timeout, broken, pool.relieve), num_processes, timeout, not is_grader, gate
        )
        self._pool = pool
        weakref.finalize(self, pool.close)

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
        waits: called now and then while it waits for an answer.
    """

    def __init__(
        self,
        start: dict[str, Any],
        timeout: float,
        broken: list[RewardFailure],
        waits: Callable[[], None] = lambda: None,
    ):
        self._start, self._timeout, self._broken, self._waits = start, timeout, broken, waits
        self._tick = min(TICK, timeout / 8)
        self._process: subprocess.Popen[bytes] | None = None
        self._frames = frames.Frames()
        self._seconds = math.inf  # that a call takes, as far as this process has shown
        self._stopped = self._killed = False

    @property
    def most(self) -> int:
        """As many calls as take a moment all together."""
        return max(1, min(MOST_AT_ONCE, int(MOMENT / self._seconds)))

    def prepare(self) -> None:
        if self._process is None and not self._broken and not self._stopped:
            self._launch()

    def handle(self, calls: Sequence[Sequence[Any]], answer: Callable[[Results | RewardFailure], None]) -> None:
        """Run calls (packed samples) in the child, up to one that fails it; one without samples only starts it."""
        self.prepare()
        if self._broken:
            return answer(self._broken[0])
        started, left = time.monotonic(), len(calls)
        try:
            for reply in self._ask(calls, self._timeout):
                if self._killed:
                    reply = self._again(calls[-left])
                left -= 1
                answer(reply if isinstance(reply, RewardFailure) else wire.unpack_results(reply))
        finally:
            if left or not self._frames.is_empty:  # what it says from now on would be taken for answers to other calls
                self._end()
        if self._process is not None and all(calls):
            seconds = (time.monotonic() - started) / len(calls)
            self._seconds = seconds if self._seconds == math.inf else (self._seconds + seconds) / 2

    def _again(self, call: Sequence[Any]) -> Any:
        """The answer to a call whose process was killed from outside, as the kernel does where memory is short.

        That is no fault of the sample, so another process scores it; a sample that gets them all killed is at fault.
        """
        notice("the process of a reward function", "it was killed from outside (SIGKILL); its sample is scored again")
        answer: Any = None
        for _ in range(MOST_KILLS - 1):
            self.prepare()
            if self._broken or self._process is None:
                return self._broken[0] if self._broken else RewardFailure("died", "the reward function was closed")
            (answer,) = self._ask([call], self._timeout)
            if not self._killed:
                return answer
        self._killed = False
        return replace(answer, message=f"{answer.message}, as {MOST_KILLS - 1} processes before it")

    def stop(self) -> None:
        """Kill the child from another thread; its own thread sees the end of the pipe and cleans up."""
        self._stopped = True
        if self._process is not None:
            _kill_group(self._process)

    def close(self) -> None:
        self._end()

    def _launch(self) -> None:
        """Start a process, and another one where it is killed from outside before it has loaded the function."""
        for attempt in range(MOST_KILLS):
            if attempt:
                notice("the process of a reward function", "it was killed from outside (SIGKILL); another one starts")
            answer = self._start_process()
            if not self._killed:
                break
        if isinstance(answer, RewardFailure):
            self._broken.append(RewardFailure("start", f"its process did not start: {answer.message}", answer.trace))
        elif answer["failure"] is not None:
            self._broken.append(replace(wire.unpack_failure(answer["failure"]), kind="start"))

    def _start_process(self) -> Any:
        """What a new process answers to the message that has it load the function."""
        self._process = subprocess.Popen(
            lifeline.guarded([sys.executable, "-c", BOOT, json.dumps([entry or os.getcwd() for entry in sys.path])]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=None if self._start["memory_mb"] is None else env.harmless(),
            start_new_session=True,  # so that whatever the function starts is killed with it
        )
        if self._stopped:
            _kill_group(self._process)
        (answer,) = self._ask([self._start], START_TIMEOUT)
        return answer

    def _ask(self, messages: Sequence[Any], timeout: float) -> Iterator[Any]:
        """Send messages; the answer to each as soon as it is there, at last a `RewardFailure` if one gets none.

        Args:
            timeout: seconds from sending, or from the answer before, to an answer.
        """
        process, self._killed = self._process, False
        if process is None or process.stdin is None:
            yield RewardFailure("died", "the reward function was closed")
            return
        try:
            for portion in _portions(map(_packed, messages), _room(process.stdin)):
                process.stdin.write(b"".join(portion))
                process.stdin.flush()
                for frame in portion:
                    yield self._receive(process, time.monotonic() + timeout) if frame else TOO_LONG
        except TimeoutError:
            self._end()
            yield too_slow(timeout, "and was stopped")
        except (OSError, EOFError):  # the pipe broke, or ended
            cause = self._end(crashed=True)
            if _status(process) == -signal.SIGPROF and self._start["cpu_seconds"] is not None:
                slow = too_slow(self._start["cpu_seconds"], "of processor time and was stopped")
                yield replace(slow, kind="processor time")
            else:
                self._killed = _status(process) == -signal.SIGKILL and not self._stopped
                yield RewardFailure("died", f"ended its process ({cause})")

    def _receive(self, process: subprocess.Popen[bytes], deadline: float) -> Any:
        """The child's next message.

        Raises:
            EOFError: it is gone.
            TimeoutError: the message was not complete at the deadline.
        """
        assert process.stdout is not None
        pipe = process.stdout.fileno()
        while True:
            message = next(self._frames.messages(), NONE_YET)
            if message is not NONE_YET:
                return message
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            if select.select([pipe], [], [], min(left, self._tick))[0]:
                piece = os.read(pipe, PIECE)
                if not piece:
                    raise EOFError
                self._frames.add(piece)
            elif process.poll() is not None:  # something that the function started may still hold the pipe open
                raise EOFError
            else:
                self._waits()

    def _end(self, crashed: bool = False) -> str:
        """Kill the child with everything that it started; returns how it ended, in words."""
        process, self._process = self._process, None
        self._frames, self._seconds = frames.Frames(), math.inf
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
        return "it was stopped" if self._stopped else lifeline.ending(_status(process))


def _status(process: subprocess.Popen[bytes]) -> int:
    """How a child ended: its exit code, or less than 0 for a signal, which its guard tells as 128 and more."""
    code = process.returncode
    return 128 - code if code > 128 else code


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _room(pipe: IO[bytes]) -> int:
    """Half of what a pipe holds; where the system cannot say, of the 16 KiB that every one has."""
    asks = getattr(fcntl, "F_GETPIPE_SZ", None)  # of Linux
    return (SMALLEST_PIPE if asks is None else int(fcntl.fcntl(pipe, asks))) // 2


def _packed(message: object) -> bytes:
    """Its frame; empty where it would be too long."""
    try:
        return frames.pack(message)
    except ValueError:
        return b""


def _portions(frames: Iterable[bytes], room: int) -> Iterator[list[bytes]]:
    """Frames to write at once: up to ``room`` bytes, or one of any size.

    Several must not fill the pipe: a child that waits until its answer is read does not read further calls.
    """
    portion: list[bytes] = []
    for frame in frames:
        if portion and sum(map(len, portion)) + len(frame) > room:
            yield portion
            portion = []
        portion.append(frame)
    yield portion
