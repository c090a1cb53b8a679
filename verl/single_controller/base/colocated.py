"""Several roles in one process: one outer worker that holds an inner worker per role.

The outer class has a method ``<role>_<method>`` for every tagged method of a role's class, with the same tag. A group's
``spawn`` gives one group per role in which the methods have their own names again. Every role keeps its own random
numbers, in whichever runtime the process lives.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import wraps
from typing import Any, ClassVar

from verl.errors import WorkerError
from verl.single_controller.base.decorator import MAGIC_ATTR
from verl.single_controller.base.resources import ClassWithInitArgs
from verl.single_controller.base.rng import RngState, worker_seed
from verl.single_controller.base.worker import Worker, build_worker


class ColocatedWorker(Worker):
    """The outer worker; made by `colocated_class`, not by hand."""

    class_dict: ClassVar[Mapping[str, ClassWithInitArgs]] = {}
    streams: ClassVar[Mapping[str, str]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.worker_dict: dict[str, Any] = {}
        self.rng_dict: dict[str, RngState] = {}
        states: dict[str, RngState] = {}
        for role, class_with_init in self.class_dict.items():
            info = replace(self.info, role=role)
            stream = self.streams.get(role, role)
            if stream not in states:
                states[stream] = RngState(worker_seed(info.seed, stream, info.rank))
            rng = self.rng_dict[role] = states[stream]
            with rng.active():
                worker = self.worker_dict[role] = build_worker(class_with_init, info)
            if isinstance(worker, Worker):
                worker.fused_worker_dict = self.worker_dict
        self.fused_worker_dict = self.worker_dict

    def meshes(self) -> dict[str, tuple[int, bool]]:
        """The outer worker answers for the meshes of all its roles."""
        meshes = super().meshes()
        for role, worker in self.worker_dict.items():
            for name, place in worker.meshes().items() if isinstance(worker, Worker) else ():
                if meshes.setdefault(name, place) != place:
                    raise WorkerError(
                        f"two roles registered the mesh {name!r} differently",
                        got=(meshes[name], place),
                        fix=f"Name the mesh of {role!r} after its role, or spawn a group per role.",
                    )
        return meshes


def colocated_class(
    class_dict: Mapping[str, ClassWithInitArgs], streams: Mapping[str, str] | None = None
) -> ClassWithInitArgs:
    """The class of a process that hosts all these roles, ready for a worker group.

    Args:
        class_dict: role name -> class with its arguments.
        streams: role name -> name of its random numbers, for roles that draw from one sequence; else it is the role's.
    """
    if not class_dict:
        raise WorkerError("a colocated worker needs at least one role")
    members: dict[str, Any] = {"class_dict": dict(class_dict), "streams": dict(streams or {})}
    for role, class_with_init in class_dict.items():
        for name, method in inspect.getmembers(class_with_init.cls, inspect.isroutine):
            if getattr(method, MAGIC_ATTR, None) is not None:
                outer = f"{role}_{name}"
                if outer in members:
                    raise WorkerError(f"two roles give the method name {outer!r}", got=sorted(class_dict))
                members[outer] = _forward(role, name, method)
    kind = type(
        "Colocated" + "".join(role.title().replace("_", "") for role in class_dict), (ColocatedWorker,), members
    )
    return ClassWithInitArgs(kind)


def _forward(role: str, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(method):

        @wraps(method)
        async def call(self: ColocatedWorker, *args: Any, **kwargs: Any) -> Any:
            return await getattr(self.worker_dict[role], name)(*args, **kwargs)
    else:

        @wraps(method)
        def call(self: ColocatedWorker, *args: Any, **kwargs: Any) -> Any:
            with self.rng_dict[role].active():
                return getattr(self.worker_dict[role], name)(*args, **kwargs)

    return call
