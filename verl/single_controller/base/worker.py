"""`Worker`: the base of everything that computes under a controller.

A worker knows its place (rank, world size, devices) and, per named mesh, which data-parallel rank it has and whether
its results are collected. The place is passed in by the builder of the worker; only a worker without a place (a
process started by torchrun) reads it from the environment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, TypeVar

from verl import env
from verl.errors import WorkerError, suggest
from verl.single_controller.base.decorator import Dispatch, Execute, register

R = TypeVar("R")

DEVICE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")


@dataclass(frozen=True)
class WorkerInfo:
    """A worker's place among its peers; ``seed`` is the run's, from which workers derive theirs."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    role: str = ""
    seed: int = 0

    @classmethod
    def from_environment(cls) -> WorkerInfo:
        """What torchrun and cluster runtimes put into RANK, WORLD_SIZE and so on; alone where they are unset."""
        return cls(
            rank=env.get_int("RANK", 0),
            world_size=env.get_int("WORLD_SIZE", 1),
            local_rank=env.get_int("LOCAL_RANK", 0),
            local_world_size=env.get_int("LOCAL_WORLD_SIZE", 1),
            master_addr=env.get("MASTER_ADDR", "127.0.0.1") or "",
            master_port=env.get_int("MASTER_PORT", 0),
        )


_placed: ContextVar[WorkerInfo | None] = ContextVar("worker_info", default=None)


def build_worker(construct: Callable[[], R], info: WorkerInfo) -> R:
    """Construct a worker (or any object that holds workers) in this place."""
    token = _placed.set(info)
    try:
        built = construct()
        if isinstance(built, Worker):
            assert built.info is info  # read now: outside, a worker that never read it would get another place
        return built
    finally:
        _placed.reset(token)


class Worker:
    """Base of worker classes. Methods tagged with `register` can be called through a worker group.

    Args:
        cuda_visible_devices: the devices this worker may use, as the runtime set them; None takes the environment's.

    Example:
        >>> class Adder(Worker):
        ...     @register(Dispatch.ONE_TO_ALL)
        ...     def add(self, x): return x + self.rank
    """

    fused_worker_dict: Mapping[str, Any] = MappingProxyType({})
    _cuda_visible_devices: str | None = None

    def __init__(self, cuda_visible_devices: str | None = None) -> None:
        self._cuda_visible_devices = cuda_visible_devices

    @cached_property
    def info(self) -> WorkerInfo:
        """The place, known from the first line of any ``__init__``, whether or not a subclass calls ours."""
        return _placed.get() or WorkerInfo.from_environment()

    @cached_property
    def _meshes(self) -> dict[str, tuple[int, bool]]:
        return {}

    @property
    def rank(self) -> int:
        return self.info.rank

    @property
    def world_size(self) -> int:
        return self.info.world_size

    @classmethod
    def env_keys(cls) -> list[str]:
        """The variables that describe a worker's place where a runtime passes it through the environment."""
        place = ["WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"]
        return [*place, *DEVICE_VARIABLES]

    def get_master_addr_port(self) -> tuple[str, str]:
        """Address and port of rank 0, for a process group."""
        return self.info.master_addr, str(self.info.master_port)

    def get_cuda_visible_devices(self) -> str:
        """The devices of this worker as a comma list, or ``not set``."""
        if self._cuda_visible_devices is not None:
            return self._cuda_visible_devices
        return next((devices for name in DEVICE_VARIABLES if (devices := env.get(name))), "not set")

    # ---- meshes ------------------------------------------------------------------------------------------------

    def set_dispatch_collect(self, mesh_name: str, dispatch_dp_rank: int, collect_dp_rank: bool) -> None:
        """Say, for one mesh, which data-parallel rank this worker has and whether its results are collected."""
        self._meshes[mesh_name] = int(dispatch_dp_rank), bool(collect_dp_rank)

    def _register_dispatch_collect_info(self, mesh_name: str, dp_rank: int, is_collect: bool) -> None:
        """As `set_dispatch_collect`; a mesh may be registered only once."""
        if mesh_name in self._meshes:
            raise WorkerError(f"the mesh {mesh_name!r} is registered already", got=self._meshes[mesh_name])
        self.set_dispatch_collect(mesh_name, dp_rank, is_collect)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def get_dispatch_collect(self) -> dict[str, dict[str, Any]]:
        """All registered meshes: ``{"dispatch_dp_rank": {mesh: rank}, "collect_dp_rank": {mesh: bool}}``."""
        meshes = self.meshes()
        return {
            "dispatch_dp_rank": {name: rank for name, (rank, _) in meshes.items()},
            "collect_dp_rank": {name: collected for name, (_, collected) in meshes.items()},
        }

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def query_dispatch_info(self, mesh_name: str) -> int:
        """This worker's data-parallel rank on a mesh."""
        return self._on_mesh(mesh_name)[0]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def query_collect_info(self, mesh_name: str) -> bool:
        """Whether this worker's results are collected on a mesh."""
        return self._on_mesh(mesh_name)[1]

    def meshes(self) -> dict[str, tuple[int, bool]]:
        """Mesh name -> (data-parallel rank, whether results are collected)."""
        return dict(self._meshes)

    def _on_mesh(self, mesh_name: str) -> tuple[int, bool]:
        ranks = self.meshes()
        if mesh_name not in ranks:
            raise WorkerError(
                f"{type(self).__name__} has no mesh {mesh_name!r}",
                allowed=sorted(ranks) or "none is registered",
                fix=suggest(mesh_name, ranks) or "Register it in init_model with set_dispatch_collect(mesh_name, ...).",
            )
        return ranks[mesh_name]

    def endpoints(self) -> Mapping[type, object]:
        """Objects of this worker that handles on it reach, too, by the class whose methods are called (`Handle.call`).

        A process whose worker has any runs an event loop for their async methods.
        """
        return {}

    # ---- other workers and foreign functions -------------------------------------------------------------------

    def get_fused_worker_by_name(self, worker_name: str) -> Worker | None:
        """The worker of another role in this process; None if it does not live here."""
        return self.fused_worker_dict.get(worker_name)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def execute_with_func_generator(self, func: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """Run a plain function as if it were a method: ``func(self, *args, **kwargs)``."""
        return func(self, *args, **kwargs)

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def execute_func_rank_zero(self, func: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """Run a plain function in the process of rank 0: ``func(*args, **kwargs)``."""
        return func(*args, **kwargs)
