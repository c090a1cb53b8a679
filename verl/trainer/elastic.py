"""On how many machines a run starts again that has lost one: on all, if another joins in time, else on those left."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from verl.config import PPOTrainerConfig, replace
from verl.config.rules.validate import validate
from verl.errors import ConfigError
from verl.metrics import notice
from verl.single_controller.base.resources import fit_together
from verl.trainer.placement import topology_of

if TYPE_CHECKING:
    from verl.single_controller.ray.cluster import ClusterNode

KEY = "trainer.nnodes"
RESTART_SECONDS = 600.0
"""That a run which starts again waits for a machine in the place of a lost one: it has to boot."""
POLL_SECONDS = 0.5


def on_present_nodes(config: PPOTrainerConfig, device: str) -> PPOTrainerConfig:
    """The run on ``trainer.nnodes`` machines of the cluster, or after `RESTART_SECONDS` on the most that are there.

    Args:
        device: what each process takes one of.

    Raises:
        ConfigError: the cluster is too small for any number of machines that the settings allow.
    """
    from verl.single_controller.ray import cluster

    resource, deadline = cluster.RESOURCES[device], time.monotonic() + RESTART_SECONDS
    most = config.trainer.nnodes
    while not has_room(config, nodes := cluster.nodes(), resource) and time.monotonic() < deadline:
        there = ", ".join(map(str, nodes))
        notice("cluster", f"the run waits up to {RESTART_SECONDS:g} s for {most} machines; there are {there or 'none'}")
        time.sleep(POLL_SECONDS)
    for size in _sizes(config):
        if has_room(size, nodes, resource) and (size is config or _is_allowed(size)):
            if size is not config:
                words = f"the run continues on {size.trainer.nnodes} of {most} machines; losses differ by rounding"
                notice(KEY, f"{words}\n{topology_of(size)}")
            return size
    largest = max((pool.processes for pool in topology_of(config).pools), key=len)
    raise cluster.too_small(largest, resource, nodes)


def has_room(config: PPOTrainerConfig, nodes: Sequence[ClusterNode], resource: str) -> bool:
    """Whether the nodes have a device for each process of all pools, and a node for each node of a pool."""
    from verl.single_controller.ray.cluster import fits_on_nodes

    pools = [list(pool.processes) for pool in topology_of(config).pools]
    together = fit_together(pools, [node.amount(resource) for node in nodes])
    return together and all(fits_on_nodes(pool, resource, nodes) for pool in pools)


def _sizes(config: PPOTrainerConfig) -> Iterator[PPOTrainerConfig]:
    yield config
    for count in range(config.trainer.nnodes - 1, 0, -1):
        yield replace(config, **{KEY: count})


def _is_allowed(size: PPOTrainerConfig) -> bool:
    """Whether no rule of the settings refuses it: sequence parallelism has to divide the processes."""
    try:
        validate(size)
    except ConfigError as error:
        notice(f"{KEY}={size.trainer.nnodes}", f"the run cannot continue on that number: {error}")
        return False
    return True
