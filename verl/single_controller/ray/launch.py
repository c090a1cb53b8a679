"""Start the processes of a group and build the worker in each."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import ray
import torch
from ray import cloudpickle
from ray._private import worker as ray_worker
from ray.exceptions import GetTimeoutError

from verl import env
from verl.errors import WorkerError
from verl.outcomes import on_error
from verl.single_controller.base.colocated import ColocatedWorker
from verl.single_controller.base.worker import DEVICE_VARIABLES, Worker, WorkerInfo
from verl.single_controller.ray import failures, host, transfer
from verl.single_controller.ray.class_with_args import RayClassWithInitArgs
from verl.single_controller.ray.fleet import Fleet, Member
from verl.single_controller.ray.resource_pool import ProcessSlot

REGISTER_SECONDS = 300.0
LOCALHOST = "127.0.0.1"
MAX_REQUESTS = 10_000
USER_MODULES = "verl_user_"
"""How `verl.registry.load_module` begins the names of modules that it loads from files."""


@dataclass(frozen=True)
class LaunchPlan:
    """What the processes of a group have in common.

    Args:
        role: name of the group; worker names and seeds derive from it.
        class_with_init: what to build.
        seed: the run's.
        share: part of a slot's device that each process takes, so that several groups may share the slot.
        detached: the processes outlive the controller and are found again by name.
        environment: variables besides the forwarded ones.
        nsight: options with which Ray starts Nsight Systems around each process; none: it does not.
        ports: range (first, last) of the port of rank 0.
        register_seconds: how long the processes may take to come up.
        num_threads: threads for plain methods of an object behind a handle.
        behind_handle: the object is only used through handles.
        by_reference: columns of batches that it returns stay in its node's object store.
    """

    role: str
    class_with_init: RayClassWithInitArgs
    seed: int = 0
    share: float = 1.0
    detached: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    nsight: Mapping[str, str] = field(default_factory=dict)
    ports: tuple[int, int] | None = None
    register_seconds: float = REGISTER_SECONDS
    num_threads: int = 1
    behind_handle: bool = False
    by_reference: bool = False

    @property
    def concurrent(self) -> bool:
        """Whether the process runs an event loop: for async methods, and for whatever is behind a handle."""
        return self.behind_handle or has_async_methods(self.class_with_init.cls)


def launch(recipe: LaunchPlan, slots: Sequence[ProcessSlot | None]) -> tuple[Fleet, tuple[str, int]]:
    """One process per slot (None leaves the place to Ray), each with its worker built.

    Returns:
        The fleet, and the address and port of rank 0.

    Raises:
        WorkerError: the processes did not come up in time.
        Exception: what a constructor raised.
    """
    transfer.install_transfer()
    actors: list[Any] = []
    with on_error(lambda _: [ray.kill(actor, no_restart=True) for actor in actors]):
        for rank, slot in enumerate(slots):
            actors.append(_actor(recipe, rank, slot))  # one by one: those made before a failure must be stopped
        fleet, master = _introduce(recipe, actors)
        _build(recipe, fleet, master)
    return fleet, master


def worker_names(role: str, size: int) -> list[str]:
    return [f"{role}[{rank}]" for rank in range(size)]


def has_async_methods(cls: Callable[..., Any]) -> bool:
    """Whether a class, or one of the classes of a colocated one, has public async methods or endpoints."""
    if inspect.isclass(cls) and issubclass(cls, ColocatedWorker):
        return any(has_async_methods(member.cls) for member in cls.class_dict.values())
    if inspect.isclass(cls) and issubclass(cls, Worker) and cls.endpoints is not Worker.endpoints:
        return True
    methods = (method for name, method in inspect.getmembers(cls, inspect.isfunction) if not name.startswith("_"))
    return any(inspect.iscoroutinefunction(method) for method in methods)


def actor_options(recipe: LaunchPlan, name: str, slot: ProcessSlot | None) -> dict[str, Any]:
    """Ray's options of a process.

    Args:
        name: the process's, by which one that is detached is looked up again.
    """
    options: dict[str, Any] = {"num_cpus": 0, "resources": dict(recipe.class_with_init.additional_resource)}
    if recipe.concurrent:
        options["max_concurrency"] = MAX_REQUESTS
    if slot is not None:
        options["scheduling_strategy"] = slot.strategy()
        if slot.resource == "GPU":
            options["num_gpus"] = recipe.share
        elif slot.resource != "CPU":
            options["resources"][slot.resource] = recipe.share
    if recipe.detached:
        options |= {"name": name, "lifetime": "detached"}
    options |= recipe.class_with_init.options
    if recipe.nsight:
        options["runtime_env"] = {"nsight": dict(recipe.nsight), **options.get("runtime_env", {})}
    return options


def _actor(recipe: LaunchPlan, rank: int, slot: ProcessSlot | None) -> Any:
    kind = host.AsyncWorkerHost if recipe.concurrent else host.WorkerHost
    name = worker_names(recipe.role, rank + 1)[rank]
    options = actor_options(recipe, name, slot)
    actor_class: Any = ray.remote(_named(kind, recipe.class_with_init.cls)).options(**options)
    extra = {"num_threads": recipe.num_threads} if recipe.concurrent else {}
    try:
        return actor_class.remote(name, _environment(recipe), [*sys.path], os.getcwd(), **extra)
    except ValueError as error:  # what Ray raises for a name in use and for resources that the slot does not have
        taken = "Give the group another name_prefix, or stop the detached one." if recipe.detached else ""
        raise WorkerError(str(error), fix=taken) from error


def _named(kind: type, worker_class: Any) -> type:
    """The host under the worker's name (in ``ps``, timelines and logs), with the worker's own methods on the actor."""
    members: dict[str, Any] = {"__module__": __name__, "__doc__": kind.__doc__}
    for name, method in inspect.getmembers(worker_class, inspect.isroutine):
        if not name.startswith("_") and inspect.getattr_static(kind, name, None) is None and inspect.isfunction(method):
            members[name] = _forward(name, kind is host.AsyncWorkerHost)
    return type(getattr(worker_class, "__name__", kind.__name__), (kind,), members)


def _forward(name: str, concurrent: bool) -> Callable[..., Any]:
    if concurrent:

        async def later(self: Any, *args: Any, **kwargs: Any) -> Any:
            return await self.request(["", name], *args, **kwargs)

        return later

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.request(["", name], *args, **kwargs)

    return method


def _environment(recipe: LaunchPlan) -> dict[str, str]:
    """The controller's variables without its devices: which device a process sees is Ray's to say."""
    forwarded = {name: value for name, value in env.forwarded().items() if name not in DEVICE_VARIABLES}
    return {**forwarded, **{name: str(value) for name, value in recipe.environment.items()}}


def _introduce(recipe: LaunchPlan, actors: Sequence[Any]) -> tuple[Fleet, tuple[str, int]]:
    names = worker_names(recipe.role, len(actors))
    questions = [actor.introduce.remote(recipe.ports) for actor in actors]
    try:
        intros = ray.get(questions, timeout=recipe.register_seconds)
    except GetTimeoutError:
        ready, _ = ray.wait(questions, num_returns=len(questions), timeout=0)
        missing = [name for name, question in zip(names, questions) if question not in ready]
        logs = ray_worker._global_node.get_logs_dir_path()  # type: ignore[attr-defined]  # None only before ray.init
        raise WorkerError(
            f"{len(missing)} of {len(actors)} worker processes did not start within {recipe.register_seconds:g} s",
            key="trainer.ray_wait_register_center_timeout",
            got=missing,
            fix="`ray status` shows whether the cluster is full; Ray's logs show whether the processes fail: "
            f"{logs} on each node.",
        ) from None
    except ray.exceptions.RayError as error:
        exception, cause = failures.meaning(error)
        raise exception from cause
    members = [
        Member(name, actor, one["node_id"], one["address"], one["pid"], one["logs"])
        for name, actor, one in zip(names, actors, intros)
    ]
    one_node = len({member.node_id for member in members}) == 1
    return Fleet(recipe.role, members), (
        LOCALHOST if one_node else intros[0]["address"],
        intros[0]["port"],
    )


def _build(recipe: LaunchPlan, fleet: Fleet, master: tuple[str, int]) -> None:
    _send_user_modules()
    boxed = [ray.put(recipe.class_with_init.plain())]
    nodes = [member.node_id for member in fleet.members]
    calls = []
    for rank, member in enumerate(fleet.members):
        info = WorkerInfo(
            rank=rank,
            world_size=len(nodes),
            local_rank=nodes[:rank].count(member.node_id),
            local_world_size=nodes.count(member.node_id),
            master_addr=master[0],
            master_port=master[1],
            role=recipe.role,
            seed=recipe.seed,
        )
        calls.append(member.actor.build.remote(boxed, asdict(info), _threads(len(nodes)), recipe.by_reference))
    failures.fetch_references(calls)


def _send_user_modules() -> None:
    """Modules that were loaded from a user's file have no importable name: what they define travels as code."""
    for name, module in list(sys.modules.items()):
        if name.startswith(USER_MODULES):
            cloudpickle.register_pickle_by_value(module)


def _threads(world_size: int) -> int | None:
    """Torch's threads per worker: as the shell says, else for one worker as here, so that it computes the same bits."""
    named = env.get("OMP_NUM_THREADS")
    if named is not None and named.isdigit():
        return int(named)
    return torch.get_num_threads() if world_size == 1 else None
