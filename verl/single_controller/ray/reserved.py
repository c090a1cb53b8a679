"""GPUs of this machine that Ray gives to no worker, for programs that are started without Ray."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorUnschedulableError, GetTimeoutError, RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl.errors import ConfigError


class GpuHolder:
    """An actor that computes nothing."""

    def names(self) -> list[str]:
        """Its GPUs as CUDA_VISIBLE_DEVICES names them."""
        return [str(number) for number in ray.get_gpu_ids()]


@dataclass(frozen=True)
class ReservedGpus:
    """GPUs that Ray counts as used until `release`, or until the cluster ends.

    Args:
        names: as CUDA_VISIBLE_DEVICES has them.
        holder: the handle of the actor that holds them; it ends with its last handle.
    """

    names: list[str]
    holder: Any

    def release(self) -> None:
        """Give them back; nothing happens where the cluster has ended."""
        if ray.is_initialized():
            ray.kill(self.holder)


def reserve_gpus(count: int, key: str, seconds: float) -> ReservedGpus:
    """GPUs on the node of this process.

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
    except (GetTimeoutError, RayActorError, ActorUnschedulableError) as error:  # the last: the node never has as many
        ray.kill(holder)
        free = int(ray.available_resources().get("GPU", 0))
        raise ConfigError(
            f"the controller's node has no {count} free GPUs for servers",
            key=key,
            got=count,
            allowed=f"{free} are free in the cluster",
            fix="Make it smaller, or give the workers fewer: trainer.n_gpus_per_node.",
        ) from error
    return ReservedGpus(names, holder)
