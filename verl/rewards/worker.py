"""The process in which a user's reward function runs: it reads calls, answers them, and is killed if it takes too long.

The parent keeps the time and kills, and `verl.lifeline` ends this process with the parent. The alarm set here is for
systems where that is not possible; its default action ends the process even while C code holds the interpreter.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from verl import stacks, terminal
from verl.errors import VerlError
from verl.rewards import wire
from verl.rewards.function import load_reward_function
from verl.rewards.invoke import invoke, raised
from verl.rewards.samples import RewardFailure, all_failed
from verl.sandbox import frames
from verl.sandbox.seal import seal

GRACE = 5.0
DENIED = ("subprocess.", "os.system", "os.exec", "os.spawn", "os.posix_spawn", "os.fork", "socket.", "ctypes.dlopen",
          "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod",
          "os.chown", "os.kill", "shutil.", "pty.", "urllib.")  # fmt: skip
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def main() -> None:
    """Serve the calls that arrive on standard input until it ends."""
    calls, answers = _take_pipes()
    stacks.listen("the reward function's process")
    _prefer_for_oom_kill()
    messages = frames.read(calls)
    start = next(messages, None)
    if start is None:
        return
    try:
        function = load_reward_function(start["origin"], start["name"], wire.from_plain(start["reward_kwargs"]))
    except (VerlError, SystemExit) as error:
        _answer(answers, frames.pack({"failure": wire.pack_failure(raised(error))}))
        return
    if start["memory_mb"] is not None:
        _seal(start["memory_mb"])
    _answer(answers, frames.pack({"failure": None}))
    process = os.getpid()
    for call in messages:
        signal.setitimer(signal.ITIMER_REAL, start["timeout"] + GRACE)
        signal.setitimer(signal.ITIMER_PROF, start["cpu_seconds"] or 0)  # its signal ends the process
        results = invoke(function, wire.unpack_samples(call)) if call else []
        if os.getpid() != process:  # a copy that the function has forked: its answer would count for the next sample
            os._exit(0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        try:
            packed = frames.pack(wire.pack_results(results))
        except (ValueError, RecursionError) as error:  # whole numbers of some thousand digits, lists in themselves
            failure = RewardFailure("value", f"returned details that cannot be sent from its process: {error}")
            packed = frames.pack(wire.pack_results(all_failed(results, failure)))
        _answer(answers, packed)


def _answer(pipe: IO[bytes], packed: bytes) -> None:
    pipe.write(packed)
    pipe.flush()


def _seal(memory_mb: int) -> None:
    """A limit of memory, and from now on no programs, connections and files to write: for graders of untrusted text.

    The kernel keeps to it; Python's own hook only says it better, and can be passed.
    """
    missing = seal(memory_mb)
    if missing:
        listed = "; ".join(f"{name} ({reason})" for name, reason in missing.items())
        print(f"a grader runs without these walls of the kernel, which are not here: {listed}", file=sys.stderr)
    sys.addaudithook(_deny)


def _deny(event: str, arguments: tuple[Any, ...]) -> None:
    if event.startswith(DENIED) or (event == "open" and (arguments[2] or 0) & WRITING):
        raise PermissionError(f"a grader may not do this: {event}")


def _take_pipes() -> tuple[int, IO[bytes]]:
    """Keep the two pipes for ourselves; what the user's code prints goes to standard error, its input is empty."""
    calls, answers = os.dup(0), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    terminal.outlive(os.devnull)
    return calls, answers


def _prefer_for_oom_kill() -> None:
    """If memory runs out because of a reward function, that function's process should go, not the training."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
