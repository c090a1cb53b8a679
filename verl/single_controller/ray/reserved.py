"""GPUs of this machine that Ray gives to no worker, for programs that are started without Ray."""

from __future__ import annotations

from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl.errors import ConfigError

_held: list[Any] = []
"""Handles of the actors that hold GPUs: an actor ends with its last handle, or with the cluster."""


class GpuHolder:
    """An actor that computes nothing."""

    def names(self) -> list[str]:
        """Its GPUs as CUDA_VISIBLE_DEVICES names them."""
        return [str(number) for number in ray.get_gpu_ids()]


def reserve_gpus(count: int, key: str, seconds: float) -> list[str]:
    """The names of GPUs on the node of this process, until the cluster ends.

    Args:
        key: the setting that names the number.
        seconds: to wait for them.

    Raises:
        ConfigError: this node does not have them, or others use them.
    """
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    holder: Any = ray.remote(GpuHolder).options(num_cpus=0, num_gpus=count, scheduling_strategy=here).remote()
    try:
        names = ray.get(holder.names.remote(), timeout=seconds)
    except (GetTimeoutError, RayActorError) as error:
        ray.kill(holder)
        free = int(ray.available_resources().get("GPU", 0))
        raise ConfigError(
            f"the controller's node has no {count} free GPUs for servers",
            key=key,
            got=count,
            allowed=f"{free} are free in the cluster",
            fix="Make it smaller, or give the workers fewer: trainer.n_gpus_per_node.",
        ) from error
    _held.append(holder)
    return names
