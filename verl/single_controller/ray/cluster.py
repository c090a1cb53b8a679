"""The machines of the cluster as Ray reports them, and whether they are enough for a run."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import compress

import ray

from verl.errors import ConfigError

RESOURCES = {"cpu": "CPU", "cuda": "GPU", "npu": "NPU"}
"""Device kind -> Ray's name of the resource."""
ANSWER_SECONDS = 5.0
MOST_CONNECTIONS = 64
"""To managers of nodes, at once."""


@dataclass(frozen=True)
class ClusterNode:
    """One living node."""

    id: str
    address: str
    resources: dict[str, float]

    def amount(self, resource: str) -> int:
        """How many whole units of a resource the node has."""
        return int(self.resources.get(resource, 0.0))

    def __str__(self) -> str:
        return f"{self.address} ({self.id[:8]})" if self.id else self.address


def nodes() -> list[ClusterNode]:
    """The living nodes, sorted by address.

    Ray takes up to half a minute to notice that a node is lost, so each node's manager has to take a connection.
    """
    alive = [n for n in ray.nodes() if n["Alive"]]
    with ThreadPoolExecutor(MOST_CONNECTIONS) as threads:  # a connection to a lost node fails after `ANSWER_SECONDS`
        answers = list(threads.map(lambda n: _answers(n["NodeManagerAddress"], n["NodeManagerPort"]), alive))
    present = compress(alive, answers)
    listed = [ClusterNode(n["NodeID"], n["NodeManagerAddress"], dict(n["Resources"])) for n in present]
    return sorted(listed, key=lambda node: (_sortable(node.address), node.id))


def devices_per_node(device: str) -> list[int]:
    """How many processes each node can hold, one device (or core) each; what `ResourcePoolManager` wants to know."""
    return [node.amount(RESOURCES[device]) for node in nodes()]


def has_devices(resource: str) -> bool:
    return any(node.amount(resource) for node in nodes())


def require_nodes(processes_on_nodes: Sequence[int], resource: str, seconds: float = 0.0) -> None:
    """Check that every entry fits on a node of its own; nodes may still join for ``seconds``.

    Raises:
        ConfigError: the cluster is too small; the message lists what the run needs and what each node has.
    """
    deadline = time.monotonic() + seconds
    while not fits_on_nodes(processes_on_nodes, resource, present := nodes()):
        if time.monotonic() >= deadline:
            raise too_small(processes_on_nodes, resource, present)
        time.sleep(0.5)


def too_small(processes_on_nodes: Sequence[int], resource: str, nodes: Sequence[ClusterNode]) -> ConfigError:
    """The error that lists sizes: needed, and available on each node."""
    sizes = ", ".join(f"{node}: {node.amount(resource)}" for node in nodes)
    count, there = len(processes_on_nodes), f"{len(nodes)} node{'' if len(nodes) == 1 else 's'}"
    needed = f"{count} node{'s' if count > 1 else ''} with {', '.join(map(str, processes_on_nodes))} {resource}s"
    many = len(processes_on_nodes) > 1
    return ConfigError(
        f"the Ray cluster is smaller than the run, which needs {needed}",
        key="trainer.nnodes" if many else "trainer.n_gpus_per_node",
        allowed=f"what the cluster has: {there}" + (f" ({sizes})" if sizes else ""),
        fix="Make a cluster with `ray start --head` on one machine and `ray start --address=...` on the others, give "
        "its nodes more with --num-cpus or --num-gpus, or lower trainer.nnodes and trainer.n_gpus_per_node.",
    )


def fits_on_nodes(processes_on_nodes: Sequence[int], resource: str, nodes: Sequence[ClusterNode]) -> bool:
    """Whether every entry has a node of its own that is large enough."""
    capacities = sorted((node.amount(resource) for node in nodes), reverse=True)
    needs = sorted(processes_on_nodes, reverse=True)
    return len(needs) <= len(capacities) and all(need <= capacity for need, capacity in zip(needs, capacities))


def _answers(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), ANSWER_SECONDS).close()
    except OSError:
        return False
    return True


def _sortable(address: str) -> tuple[int | str, ...]:
    """10.0.0.9 before 10.0.0.10."""
    parts = address.split(".")
    return tuple(int(part) for part in parts) if all(part.isdigit() for part in parts) else (1 << 32, address)
