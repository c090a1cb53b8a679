"""A sampler over servers that are started for one piece of work and end with it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from verl.ports import free_port
from verl.rollout.base import Sampler
from verl.rollout.from_sync import run_now
from verl.rollout.server.process import END_WITH_STDIN, ServerProcess
from verl.rollout.server.sampler import ServerSampler, over_addresses


@contextlib.contextmanager
def served(rollout: Any, model: Any, count: int, device: str, argv: Sequence[str]) -> Iterator[Sampler]:
    """``count`` servers with the engine of ``rollout.name``, or those that ``rollout.server.url`` names.

    Args:
        rollout, model: sections of the configuration.
        argv: the command line that the configuration came from; the servers read it too.
    """
    if rollout.server.url:
        yield ServerSampler.from_config(rollout, model)
        return
    started: list[ServerProcess] = []
    try:
        for number in range(count):
            port = free_port()
            command = [sys.executable, "-m", "verl.rollout.server.host", "--port", str(port), "--device", device]
            command += [END_WITH_STDIN, *argv]
            started.append(ServerProcess(command, port, name=f"server {number}"))
        for process in started:
            run_now(process.wait_until_up(rollout.server.max_start_wait_time))
        yield over_addresses([process.url for process in started], rollout, model, api="verl")
    finally:
        for process in started:
            process.close()
