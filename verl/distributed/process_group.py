"""Joining the processes of a run: one group for all of them, gloo for tensors on the host, the vendor's for devices.

A worker's runtime tells it its place (rank, world size, address of rank 0); a process started by torchrun finds it in
the environment. A process that is alone gets a group of one without opening a port, because a sharded model needs a
mesh even then.
"""

from __future__ import annotations

import atexit
import gc
import logging
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from verl import env
from verl.distributed.mesh import release_groups
from verl.distributed.ranks import Ranks
from verl.distributed.store import keep_gloo_on, meet
from verl.errors import EngineError

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}
TIMEOUT = 600.0
"""Seconds, as ``actor_rollout_ref.nccl_timeout`` has it."""
log = logging.getLogger(__name__)


class HasRank(Protocol):
    """What is needed of a process's place; a worker's ``info`` has it."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def master_addr(self) -> str: ...
    @property
    def master_port(self) -> int: ...


@dataclass(frozen=True)
class RankPlace:
    """A process among those of the run, and where rank 0 is met."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0

    @classmethod
    def from_environment(cls) -> RankPlace:
        """What torchrun and cluster runtimes put into RANK, WORLD_SIZE and so on; alone where they are unset."""
        return cls(
            rank=env.get_int("RANK", 0),
            world_size=env.get_int("WORLD_SIZE", 1),
            local_rank=env.get_int("LOCAL_RANK", 0),
            master_addr=env.get("MASTER_ADDR") or "127.0.0.1",
            master_port=env.get_int("MASTER_PORT", 0),
        )


def join_group(place: HasRank | None = None, device: str = "cpu", timeout: float | None = None) -> Ranks:
    """Join the group of this run's processes, once per process; every later call gives the same ranks.

    Args:
        place: None takes the group that was joined before, else the environment.
        device: kind of device that this process computes on; its own one becomes the current one.
        timeout: seconds after which a collective that some rank does not enter is an error.

    Raises:
        EngineError: the other processes cannot be met, or this process has another place already.
    """
    if dist.is_initialized():
        return _joined(place)
    at = RankPlace.from_environment() if place is None else place
    _check(at, device)
    _choose_device(at, device)
    limit = timedelta(seconds=TIMEOUT if timeout is None else float(timeout))
    try:
        store = _store(at, limit)
        dist.init_process_group(BACKENDS[device], timeout=limit, rank=at.rank, world_size=at.world_size, store=store)
    except (RuntimeError, ValueError, OSError) as error:
        raise EngineError(
            f"rank {at.rank} could not meet the other {at.world_size - 1} processes: {_first_line(error)}",
            got=f"{at.master_addr}:{at.master_port}",
            fix="Does every process run, can it reach that address, and is the port free there?",
        ) from error
    if at.world_size == 1:
        atexit.register(
            leave_group
        )  # several ranks leave by a call: after an error they would wait for ranks that are gone
    log.info("rank %d of %d ranks joined the group over %s", at.rank, at.world_size, BACKENDS[device])
    return Ranks.of_world()


def leave_group() -> None:
    """Leave the group; nothing to do where none was joined.

    The threads of a group end with its last reference. They must not outlive this call: one that drops a tensor while
    the interpreter is being torn down is cut off there, which aborts the process after all its work is done. A process
    that is alone calls this at its end by itself.
    """
    if dist.is_initialized():
        atexit.unregister(leave_group)
        dist.destroy_process_group()
        release_groups()
        gc.collect()  # engines are in reference cycles, and hold groups


def _store(place: HasRank, timeout: timedelta) -> dist.Store:
    """The rendezvous store; torchrun holds it itself, and a single process needs no network."""
    if place.world_size == 1:
        return dist.HashStore()
    host = place.master_addr.strip("[]")
    keep_gloo_on(host)
    is_first = place.rank == 0 and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return meet(host, place.master_port, place.world_size, is_first, timeout)


def _joined(place: HasRank | None) -> Ranks:
    ranks = Ranks.of_world()
    if place is not None and (place.rank, place.world_size) != (ranks.rank, ranks.size):
        raise EngineError(
            f"this process has joined its group as rank {ranks.rank} of {ranks.size} already",
            got=f"rank {place.rank} of {place.world_size}",
            fix="A sharded model needs one process per rank: use trainer.runtime=ray or torchrun.",
        )
    return ranks


def _check(place: HasRank, device: str) -> None:
    if device not in BACKENDS:
        raise EngineError("several processes cannot compute together on this device", got=device, allowed=BACKENDS)
    if not 0 <= place.rank < place.world_size:
        raise EngineError("RANK must lie below WORLD_SIZE", got=f"rank {place.rank} of {place.world_size}")
    if place.world_size > 1 and not place.master_port:
        raise EngineError(
            f"{place.world_size} processes need an address at which they meet",
            fix="Start them with torchrun, or set MASTER_ADDR and MASTER_PORT to those of rank 0.",
        )


def _choose_device(place: HasRank, device: str) -> None:
    """Each process its own device; where a runtime shows a process one device only, that one."""
    if device == "cpu":
        return
    module = torch.get_device_module(device)
    module.set_device(place.local_rank % max(1, module.device_count()))


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
