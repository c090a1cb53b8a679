"""Start or join the cluster of a run, and leave it without a trace."""

from __future__ import annotations

import inspect
import logging
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from verl import device
from verl.metrics import notice
from verl.single_controller.ray import address as addresses
from verl.single_controller.ray import cluster, fleet, security

NAMESPACE = "verl"
CONNECT_SECONDS, JOIN_SECONDS = 10.0, 30.0
_ONLY_AT_START = ("num_cpus", "num_gpus", "resources", "labels", "object_store_memory", "include_dashboard")


@dataclass(frozen=True)
class RayCluster:
    """The cluster that a run lives in.

    Args:
        address: of its control service.
        is_owned: this process started it and `stop_cluster` ends it.
        nodes: its nodes, sorted by address.
        device: what each process takes one of: ``cpu``, ``cuda`` or ``npu``.
    """

    address: str
    is_owned: bool
    nodes: tuple[cluster.ClusterNode, ...]
    device: str = "cpu"


def start_cluster(
    processes_on_nodes: Sequence[int] = (1,),
    device_name: str | None = "cpu",
    ray_init: Mapping[str, Any] | None = None,
    connect_seconds: float = CONNECT_SECONDS,
    join_seconds: float = JOIN_SECONDS,
    further_processes: int = 0,
) -> RayCluster:
    """Join the cluster that `find_address` names, or start one on this machine; a running connection is kept.

    Args:
        processes_on_nodes: processes that the run needs on each of its nodes; ``[8, 8]`` is two nodes of eight.
        device_name: what each process needs one of: ``cpu``, ``cuda`` or ``npu``; None takes the accelerator that the
            cluster has, and the CPU where it has none.
        ray_init: ``ray_kwargs.ray_init``; entries that are None are left to Ray.
        connect_seconds: how long an address may take to answer.
        join_seconds: how long nodes may take to join.
        further_processes: processes of other pools, on whichever nodes have room; a cluster of this process's own is
            made large enough for them.

    Raises:
        ConfigError: the address does not answer or refuses the token, or the cluster is smaller than the run needs.
    """
    settings = _arguments(ray_init or {})
    is_owned = False
    if not ray.is_initialized():
        address = addresses.find_address(settings)
        settings.pop("address", None)
        if address is None:
            is_owned = True
            here = [processes_on_nodes[0] + further_processes, *processes_on_nodes[1:]]
            _start_own(here, device_name or device.resolve_device(None), settings)
        else:
            _join(address, settings, connect_seconds)
    kind = device_name or _accelerator(processes_on_nodes, join_seconds)
    cluster.require_nodes(processes_on_nodes, cluster.RESOURCES[kind], join_seconds)
    return RayCluster(ray.get_runtime_context().gcs_address, is_owned, tuple(cluster.nodes()), kind)


def stop_cluster(timeline_json_file: str | None = None) -> None:
    """Stop all worker groups of this process and leave the cluster; one that this process started ends.

    Args:
        timeline_json_file: write Ray's timeline there first (``ray_kwargs.timeline_json_file``).
    """
    if not ray.is_initialized():
        return
    if timeline_json_file:
        ray.timeline(filename=timeline_json_file)
    fleet.close_all()
    if "wait_for_processes" in inspect.signature(ray.shutdown).parameters:
        ray.shutdown(wait_for_processes=True)
    else:
        ray.shutdown()


def _accelerator(processes_on_nodes: Sequence[int], join_seconds: float) -> str:
    """The kind of device that the cluster has, once its nodes have joined."""
    deadline = time.monotonic() + join_seconds
    while len(cluster.nodes()) < len(processes_on_nodes) and time.monotonic() < deadline:
        time.sleep(0.5)
    kinds = [kind for kind, resource in cluster.RESOURCES.items() if kind != "cpu" and cluster.has_devices(resource)]
    return kinds[0] if kinds else "cpu"


def _start_own(processes_on_nodes: Sequence[int], device_name: str, settings: dict[str, Any]) -> None:
    settings.setdefault("num_cpus", max(device.usable_cores(), processes_on_nodes[0]))
    settings.setdefault("include_dashboard", False)
    _check_this_machine(processes_on_nodes, device_name, settings)
    security.demand_token()
    settings.setdefault("_temp_dir", security.folder_for_files())
    with security.on_loopback():
        _connect("local", settings)


def _check_this_machine(processes_on_nodes: Sequence[int], device_name: str, settings: Mapping[str, Any]) -> None:
    """Refuse what cannot work before anything is started."""
    resource = cluster.RESOURCES[device_name]
    size = settings["num_cpus"] if resource == "CPU" else settings.get("num_gpus", device.device_count(device_name))
    here = cluster.ClusterNode("", "this machine", {resource: size})
    if not cluster.fits_on_nodes(processes_on_nodes, resource, [here]):
        raise cluster.too_small(processes_on_nodes, resource, [here])


def _join(address: str, settings: dict[str, Any], connect_seconds: float) -> None:
    addresses.wait_for_cluster(address, connect_seconds)
    for name in _ONLY_AT_START:
        if settings.pop(name, None) is not None:
            notice(f"ray_kwargs.ray_init.{name}", f"has no effect: the cluster at {address} runs already")
    _connect(address, settings)


def _connect(address: str, settings: dict[str, Any]) -> None:
    """Ray's init puts its own handler of SIGTERM in place of one that the run has set: that one is restored.

    What it starts inherits that SIGHUP is ignored: a terminal that hangs up sends it to all, and the run is to save.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    security.forbid_implicit_start()
    if is_main := threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    ray.init(address=address, **{"namespace": NAMESPACE, "logging_level": logging.WARNING, **settings})
    for number, handler in before.items():
        if is_main and (callable(handler) or number == signal.SIGHUP):
            signal.signal(number, handler)


def _arguments(ray_init: Mapping[str, Any]) -> dict[str, Any]:
    """The section as arguments of ray.init; ``further`` holds those that it does not name."""
    settings = _given(ray_init)
    settings |= settings.pop("further", {})
    workers = dict(settings.pop("runtime_env", {}))
    workers |= workers.pop("further", {})
    if "env_vars" in workers:
        workers["env_vars"] = {name: str(value) for name, value in workers["env_vars"].items()}  # Ray takes texts alone
    return settings | ({"runtime_env": workers} if workers else {})


def _given(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The entries that are set, at any depth."""
    entries: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            value = _given(value) or None
        if value is not None:
            entries[key] = value
    return entries
