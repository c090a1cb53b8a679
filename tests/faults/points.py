"""Named moments of a run at which the process that reaches them is hit.

A worker imports this module through ``external_lib``, the controller before its program starts, so the library knows
nothing of it. ``VERL_TEST_FAULT=<point>:<n>:<SIGNAL>`` hits at the n-th time that a process reaches the point;
``PAUSE`` instead of a signal writes the process's number into the file ``paused`` and waits until that is removed,
``FULL`` limits the size of files, ``ENOSPC`` takes the room of the disk
below the journal, ``AWAY`` puts a file in the place of the run's folder, ``SLOW`` delays from there on
and adds a byte to the file ``slow`` each time.

Points of a step: generation, loop (of an agent), scoring, backward, optimizer_begin, optimizer_end. Of a save: begin,
shard (after every tensor), files, manifest, published, tracker, retention:renamed. Of a resume: load. Of new weights:
send (a rank of the actor), take (a sampler, after every bucket). Of the journal: ledger (before a line), torn (in the
middle of it). A process that is killed at its point writes the line "<process> <point>" into the file ``hits`` before.
"""

from __future__ import annotations

import functools
import os
import resource
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

VARIABLE = "VERL_TEST_FAULT"
PAUSE_SECONDS = 900.0
SLOW_SECONDS = 0.01
FULL_BYTES = 24000


class NoRoom(Exception):
    """The file that is written is to get no further byte."""


class Fault:
    """What is to happen, where, and how often that place has been passed."""

    def __init__(self, text: str):
        self.point, count, self.action = text.rsplit(":", 2)
        self.count, self._lock = int(count), threading.Lock()

    def reach(self, point: str) -> None:
        if point != self.point:
            return
        with self._lock:
            self.count -= 1
            hit = self.count == 0
        if hit:
            self._happen()

    def _happen(self) -> None:
        if self.action == "FULL":
            resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_BYTES, FULL_BYTES))
        elif self.action == "ENOSPC":
            raise NoRoom
        elif self.action == "AWAY":
            os.rename("run", "run.away")
            Path("run").write_text("a file is here now")
        elif self.action == "SLOW":
            self.count = 1  # from here on every time
            time.sleep(SLOW_SECONDS)
            with open("slow", "ab") as times:
                times.write(b".")
        elif self.action == "PAUSE":
            self._pause()
        else:
            with open("hits", "a") as hits:
                hits.write(f"{os.getpid()} {self.point}\n")
            os.kill(os.getpid(), signal.Signals[f"SIG{self.action}"])

    def _pause(self) -> None:
        Path("paused.new").write_text(str(os.getpid()))
        Path("paused.new").rename("paused")
        end = time.monotonic() + PAUSE_SECONDS
        while Path("paused").exists() and time.monotonic() < end:
            time.sleep(0.02)


def install(fault: Fault) -> None:
    """Wrap the methods behind the points in this process."""
    from verl.agent_loop.runner import RowRunner
    from verl.checkpoint import part, writer
    from verl.engines.torch_engine import TorchEngine
    from verl.rewards.managers.base import RewardManager
    from verl.rollout.hf.sampler import HFSampler
    from verl.workers.sending import WeightSender

    _before(HFSampler, "_step", lambda: fault.reach("generation"))
    _before(RowRunner, "run", lambda: fault.reach("loop"))
    _before(RewardManager, "__call__", lambda: fault.reach("scoring"))
    _before(WeightSender, "send", lambda: fault.reach("send"))
    _before(TorchEngine, "load_state", lambda: fault.reach("load"))
    _inside_weights(fault)
    _inside_ledger(fault)
    _inside_backward(fault)
    register_optimizer_step_pre_hook(lambda *_: fault.reach("optimizer_begin"))
    register_optimizer_step_post_hook(lambda *_: fault.reach("optimizer_end"))
    for module in (part, __import__(TorchEngine.__module__, fromlist=["write_tensors"])):
        original = module.write_tensors

        def write(
            path: Path, tensors: Any, progress: Any = None, metadata: Any = None, original: Any = original
        ) -> Any:
            return original(path, tensors, lambda size: fault.reach("shard"), metadata)

        module.write_tensors = write
    begin = writer.CheckpointWriter.__init__

    def with_points(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **{**kwargs, "point": fault.reach})

    writer.CheckpointWriter.__init__ = with_points


def _before(cls: type, name: str, action: Any) -> None:
    original = getattr(cls, name)

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        action()
        return original(self, *args, **kwargs)

    setattr(cls, name, wrapped)


def _inside_backward(fault: Fault) -> None:
    """Reach ``backward`` while gradients flow: after the last operation's, before the first one's."""
    original = torch.Tensor.backward

    def backward(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        node = self.grad_fn
        while node is not None and node.next_functions and node.next_functions[0][0] is not None:
            node = node.next_functions[0][0]
            if type(node).__name__ != "AccumulateGrad":
                node.register_prehook(lambda *_: fault.reach("backward"))
                break
        original(self, *args, **kwargs)

    torch.Tensor.backward = backward


def _inside_weights(fault: Fault) -> None:
    """Reach ``take`` when a sampler has a bucket of a new version, and may have none of the others."""
    from verl.rollout.hf.sampler import HFSampler

    original = HFSampler.update_weights

    async def update_weights(self: Any, chunks: Any, version: int) -> None:
        def watched() -> Any:
            for chunk in chunks:
                yield chunk
                fault.reach("take")

        await original(self, watched(), version)

    HFSampler.update_weights = update_weights


def _inside_ledger(fault: Fault) -> None:
    """Reach ``ledger`` before entries are written, and ``torn`` once half of their bytes are in the file."""
    from verl.journal.file import Journal

    class Torn:
        def __init__(self, file: Any):
            self._file = file

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: Any) -> None:
            self._file.close()

        def write(self, data: bytes) -> int:
            try:
                fault.reach("ledger")
            except NoRoom:
                self._file.write(data[: len(data) // 2])
                os.dup2(os.open("/dev/full", os.O_WRONLY), self._file.fileno())
            if fault.point != "torn":
                return self._file.write(data)
            half = len(data) // 2
            written = self._file.write(data[:half])
            fault.reach("torn")
            return written + self._file.write(data[half:])

    for name in ("__init__", "_begin_segment"):
        begin = getattr(Journal, name)

        @functools.wraps(begin)
        def opened(self: Any, *args: Any, begin: Any = begin, **kwargs: Any) -> None:
            begin(self, *args, **kwargs)
            self._file = Torn(self._file)

        setattr(Journal, name, opened)


_fault = Fault(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None
if _fault is not None:
    install(_fault)
