"""A sampler over servers that are started for one piece of work and end with it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from verl import env
from verl.config.sampler_sizes import devices_of
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
            own = devices_of_server(number, devices_of(rollout), device)
            started.append(ServerProcess(command, port, own, name=f"server {number}"))
        for process in started:
            run_now(process.wait_until_up(rollout.server.max_start_wait_time))
        yield over_addresses([process.url for process in started], rollout, model, api="verl")
    finally:
        for process in started:
            process.close()


def devices_of_server(number: int, each: int, device: str) -> dict[str, str]:
    """The environment that shows a server its own GPUs: ``each`` of those that this process sees.

    Args:
        number: of the server, from 0.
    """
    if device != "cuda":
        return {}
    visible = env.get("CUDA_VISIBLE_DEVICES")
    first = number * each
    names = [str(n) for n in range(first + each)] if not visible else visible.split(",")
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[first : first + each])}
