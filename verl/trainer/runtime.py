"""Where a run runs: this process or a cluster; threads, seeds and logging are set here, the same in every form."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from verl import device, env, lifeline, terminal
from verl.checkpoint import RemoteCheckpoints, RunLock
from verl.config import PPOTrainerConfig, save_config, to_dict
from verl.config.loading.configuration import writable
from verl.config.machine.pools import refuse_without_cuda, roles
from verl.config.machine.profiling import worker_nsight_options
from verl.config.schema.sft import SupervisedConfig
from verl.metrics import notice, start_logging
from verl.observability.tracking import Tracking
from verl.registry import refuse_while_loading
from verl.trainer.placement import Place, topology_of
from verl.viewer.run_page import run_page

RunConfig = PPOTrainerConfig | SupervisedConfig


if TYPE_CHECKING:
    from verl.single_controller.ray.runtime import RayCluster


def prepare_process(seed: int, folder: str | None = None) -> None:
    """Streams, logging, threads, memory and random numbers of this process.

    Args:
        seed: master seed; python, numpy and torch start from it.
        folder: of the run, for ``output.txt``: what the run prints once its terminal is gone.
    """
    refuse_while_loading()
    terminal.say_exits()
    lifeline.end_leftovers_at_exit(terminal.tell)
    terminal.outlive(os.devnull if folder is None else Path(folder, "output.txt"))
    start_logging()
    env.set_default("TOKENIZERS_PARALLELISM", "true")
    device.set_threads()
    device.keep_freed_memory()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextmanager
def run_place(config: PPOTrainerConfig, is_restart: bool = False) -> Iterator[tuple[PPOTrainerConfig, Place]]:
    """The configuration of a run, which a restart may change to fewer machines, and its place.

    Its end stops the workers and the cluster that this run started.

    Args:
        is_restart: the run starts again (``trainer.max_restarts``), and waits longer for lost machines.

    Raises:
        ConfigError: the machine, or the cluster, is smaller than the run; an address that does not answer.
        MissingDependencyError: the run needs Ray, which is not installed.
    """
    variables = config.ray_kwargs.ray_init.runtime_env.env_vars
    words = {name: str(value) for name, value in variables.items()}
    with env.within(words), outside_of_loop():  # this may be the run's only process
        yield from _enter(config, is_restart)


@contextmanager
def outside_of_loop() -> Iterator[None]:
    """A notebook runs its cells inside an event loop, where no other one may start; a run starts several.

    The kernel's loop stands still during a cell anyway. It is out of sight for as long, in this thread, so that signals
    and breakpoints work as in a script.
    """
    loop = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        if loop is not None:
            asyncio._set_running_loop(loop)
            asyncio.set_event_loop(loop)


def _enter(config: PPOTrainerConfig, is_restart: bool) -> Iterator[tuple[PPOTrainerConfig, Place]]:
    prepare_process(config.trainer.seed, config.trainer.default_local_dir)
    external_lib = config.actor_rollout_ref.model.external_lib
    topology = topology_of(config)
    notice("topology", str(topology))
    if topology.runtime == "local":
        on = device.resolve_device(config.trainer.device)
        if config.transfer_queue.enable:
            notice("transfer_queue.enable", "has no effect in a run of one process, where no column travels")
        refuse_without_cuda(roles(config), on, external_lib)
        yield config, Place("local", on)
        return
    from verl.single_controller import ray as cluster  # loads Ray

    try:
        config, place = _on_ray(config, is_restart)
        refuse_without_cuda(roles(config), place.device, external_lib)
        random.seed(config.trainer.seed)  # Ray draws from python's generator while it starts
        yield config, place
    finally:
        cluster.stop_cluster(config.ray_kwargs.timeline_json_file)


def check_run_folders(config: RunConfig) -> None:
    """Check that this run can write into its folders, before anything is loaded; changes nothing in them.

    Raises:
        CheckpointError: another run writes into it, or the remote one does not answer.
        ConfigError: it cannot be written.
    """
    folder = Path(config.trainer.default_local_dir)
    with writable(folder):
        if (folder / ".lock").is_file():
            RunLock(folder).release()
    remote = RemoteCheckpoints.of(config.trainer)
    if remote is not None:
        remote.check()


def write_config(config: RunConfig) -> None:
    """Write the resolved configuration next to the run's results, once no check can refuse the run.

    Raises:
        ConfigError: the folder cannot be written.
    """
    save_config(config, Path(config.trainer.default_local_dir) / "config.yaml")


def page_of_run(config: RunConfig, tracking: Tracking, samples: Path | None = None) -> AbstractContextManager[None]:
    """The page of the run (``trainer.viewer``) for as long as the block lasts, where it is on.

    Args:
        tracking: it has begun, so that its file of metrics is there.
        samples: where the run writes its samples; None: nowhere.
    """
    if not config.trainer.viewer:
        return nullcontext()
    file = tracking.logger.get("file")
    return run_page(Path(config.trainer.default_local_dir), None if file is None else file.place, samples)


def _on_ray(config: PPOTrainerConfig, is_restart: bool) -> tuple[PPOTrainerConfig, Place]:
    from verl.single_controller import ray as cluster
    from verl.single_controller.ray.address import find_address
    from verl.single_controller.ray.cluster import devices_per_node
    from verl.trainer.elastic import on_present_nodes

    topology = topology_of(config)
    settings = to_dict(config.ray_kwargs.ray_init)
    kind = config.trainer.device
    if find_address(settings) is None:
        kind = device.resolve_device(kind)
    largest = max(topology.pools, key=lambda pool: (len(pool.processes), max(pool.processes)))
    others = topology.processes - largest.size
    needed = list(largest.processes)[: 1 if is_restart else None]  # a restart waits for the others below
    started = cluster.start_cluster(needed, kind, settings, further_processes=others)
    config = on_present_nodes(config, started.device) if is_restart else config
    _tell(started)
    on_device = started.device != "cpu"
    return config, Place(
        kind="ray",
        device=started.device,
        group_class=partial(
            cluster.RayWorkerGroup,
            device_name=started.device,
            use_gpu=on_device,
            ray_wait_register_center_timeout=config.trainer.ray_wait_register_center_timeout,
            profile_steps=config.global_profiler.steps,
            worker_nsight_options=worker_nsight_options(config),
            by_reference=config.transfer_queue.enable,
        ),
        pool_class=partial(cluster.RayResourcePool, use_gpu=on_device),
        devices_per_node=devices_per_node(started.device),
    )


def _tell(started: RayCluster) -> None:
    nodes = started.nodes
    where = "a Ray cluster of its own" if started.is_owned else f"the Ray cluster at {started.address}"
    notice("trainer.runtime", f"the run uses {where} with {len(nodes)} node(s): {', '.join(map(str, nodes))}")


__all__ = ["Place", "prepare_process", "run_place"]
