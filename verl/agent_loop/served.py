"""A sampler over servers that are started for one piece of work and end with it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from verl import device as devices
from verl.config.machine.pools import spec_of
from verl.config.schema.model import HFModelConfig
from verl.config.schema.rollout import RolloutConfig
from verl.errors import ConfigError
from verl.outcomes import run_now
from verl.rollout.base import Sampler
from verl.rollout.server.process import HostProcess
from verl.rollout.server.sampler import ServerSampler, over_addresses
from verl.serving import secret


@contextlib.contextmanager
def served(
    rollout: RolloutConfig, model: HFModelConfig, count: int, device: str, argv: Sequence[str]
) -> Iterator[Sampler]:
    """``count`` servers with the engine of ``rollout.name``, or those that ``rollout.server.url`` names.

    Args:
        rollout, model: sections of the configuration.
        argv: the command line that the configuration came from; the servers read it too.
    """
    if rollout.server.url:
        yield ServerSampler.from_config(rollout, model)
        return
    key = secret.new_key()
    started: list[HostProcess] = []
    try:
        for number in range(count):
            variables = devices_of_server(number, spec_of(rollout).devices, device)
            started.append(HostProcess(argv, device, f"server {number}", key=key, environment=variables))
        for process in started:
            run_now(process.wait_until_up(rollout.server.max_start_wait_time))
        yield over_addresses([process.url for process in started], rollout, model, "verl", key)
    finally:
        for process in started:
            process.close()


def devices_of_server(number: int, each: int, device: str) -> dict[str, str]:
    """The environment that shows a server its own GPUs: ``each`` of those that this process sees.

    Args:
        number: of the server, from 0.

    Raises:
        ConfigError: this process sees fewer.
    """
    if device != "cuda":
        return {}
    gpus, end = devices.visible_gpus(), (number + 1) * each
    if len(gpus) < end:
        message = f"server {number} would have the GPUs {end - each} to {end - 1} of this machine"
        fix = "Start fewer servers, or with fewer GPUs each (actor_rollout_ref.rollout.tensor_model_parallel_size)."
        raise ConfigError(message, key="CUDA_VISIBLE_DEVICES", allowed=f"{len(gpus)} GPU(s) in all", fix=fix)
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[end - each : end])}
