"""`RayWorkerGroup`: workers in processes on the cluster, called exactly as a local group is called.

Calls that do not wait return Ray's references, or a `DataProtoFuture` of them. Every worker runs the calls of its
group one after the other, in the order in which they were made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import ray

from verl.config.machine.profiling import nsight_options
from verl.errors import WorkerError, suggest
from verl.single_controller.base.colocated import ColocatedWorker
from verl.single_controller.base.resources import ClassWithInitArgs, ResourcePool
from verl.single_controller.base.worker_group import WorkerGroup
from verl.single_controller.ray import failures, transfer
from verl.single_controller.ray.class_with_args import RayClassWithInitArgs
from verl.single_controller.ray.fleet import Fleet, Member
from verl.single_controller.ray.handle import RayHandle
from verl.single_controller.ray.launch import REGISTER_SECONDS, LaunchPlan, launch, worker_names
from verl.single_controller.ray.resource_pool import ProcessSlot, RayResourcePool
from verl.stacks import Process


class RayWorkerGroup(WorkerGroup):
    """One worker process per process of the pool.

    Args:
        resource_pool: where they run; None means one process anywhere.
        ray_cls_with_init: the worker class and its arguments; may be colocated. ``class_with_init`` is the same.
        bin_pack: the processes of a node lie on one node for sure; else as near as possible.
        name_prefix: the role's name, for messages, logs, seeds, and the names of detached workers.
        detached: the workers outlive this process; `from_detached` finds them.
        worker_names, worker_handles: attach to workers that exist (see `from_detached`).
        ray_wait_register_center_timeout: seconds that the processes may take to come up.
        device_name: ``cuda``, ``npu`` or ``cpu``; None takes what the pool has.
        profile_steps, worker_nsight_options: with options, Ray starts Nsight Systems around every worker.
        worker_env: more environment variables for the workers.
        master_port_range: first and last port that rank 0 may offer for process groups.
        use_gpu: False overrides the pool's.
        seed: the run's seed; each worker starts from `worker_seed` (seed, role, rank).
        by_reference: columns of the batches that workers return stay in Ray's object store on their nodes, and the
            caller gets lazy ones (`verl.protocol.lazy`); False: he gets all of them.

    Example:
        >>> group = RayWorkerGroup(RayResourcePool([2]), RayClassWithInitArgs(CriticWorker, config))
        >>> values = group.compute_values(batch)
        >>> group.close()
    """

    _register_seconds = REGISTER_SECONDS

    def __init__(
        self,
        resource_pool: RayResourcePool | None = None,
        ray_cls_with_init: ClassWithInitArgs | None = None,
        bin_pack: bool = True,
        name_prefix: str | None = None,
        detached: bool = False,
        worker_names: Sequence[str] | None = None,
        worker_handles: Sequence[Any] | None = None,
        ray_wait_register_center_timeout: float = REGISTER_SECONDS,
        *,
        class_with_init: ClassWithInitArgs | None = None,
        device_name: str | None = None,
        profile_steps: Sequence[int] | None = None,
        worker_nsight_options: Mapping[str, Any] | None = None,
        worker_env: Mapping[str, str] | None = None,
        master_port_range: Sequence[int] | None = None,
        use_gpu: bool = True,
        seed: int = 0,
        by_reference: bool = False,
    ):
        super().__init__(resource_pool)
        self._register_seconds = ray_wait_register_center_timeout
        constructor = ray_cls_with_init or class_with_init
        if constructor is None:
            raise WorkerError("a worker group needs a class", fix="Pass RayClassWithInitArgs(MyWorker, ...).")
        ray_cls = RayClassWithInitArgs.of(constructor)
        role = name_prefix or ray_cls.cls.__name__
        if worker_names or worker_handles:
            fleet, master = _attached(role, worker_names, worker_handles)
        else:
            slots: list[ProcessSlot | None] = [None]
            if resource_pool is not None:
                device = device_name or "cuda" if use_gpu else "cpu"
                slots = [*resource_pool.slots("STRICT_PACK" if bin_pack else "PACK", device)]
            recipe = LaunchPlan(
                role=role,
                class_with_init=ray_cls,
                seed=seed,
                share=1 / resource_pool.max_colocate_count if resource_pool is not None else 1.0,
                detached=detached,
                environment=worker_env or {},
                nsight=nsight_options(worker_nsight_options or {}, profile_steps),
                ports=(master_port_range[0], master_port_range[1]) if master_port_range else None,
                register_seconds=ray_wait_register_center_timeout,
                by_reference=by_reference,
            )
            fleet, master = launch(recipe, slots)
        self._attach(role, ray_cls.cls, fleet, master)
        self.start_worker_aliveness_check()

    @classmethod
    def on_device(cls, device_name: str, by_reference: bool = False) -> Callable[..., RayWorkerGroup]:
        """Takes any pool: one of another runtime becomes Ray's, of as many processes on as many nodes."""
        use_gpu = device_name != "cpu"

        def make(pool: ResourcePool, *args: Any, **kwargs: Any) -> RayWorkerGroup:
            if not isinstance(pool, RayResourcePool):
                pool = RayResourcePool(pool.store, use_gpu, max_colocate_count=pool.max_colocate_count)
            return cls(pool, *args, device_name=device_name, use_gpu=use_gpu, by_reference=by_reference, **kwargs)

        return make

    @classmethod
    def from_detached(
        cls,
        name_prefix: str | None = None,
        worker_names: Sequence[str] | None = None,
        worker_handles: Sequence[Any] | None = None,
        ray_cls_with_init: ClassWithInitArgs | None = None,
        **kwargs: Any,
    ) -> RayWorkerGroup:
        """The group of workers that an earlier run left; by prefix, by names or by handles, in the order of ranks."""
        if not worker_names and not worker_handles:
            if name_prefix is None:
                raise WorkerError("which workers?", fix="Give name_prefix, worker_names or worker_handles.")
            worker_names = _names_of(name_prefix)
        return cls(None, ray_cls_with_init, True, name_prefix, True, worker_names, worker_handles, **kwargs)

    def _attach(self, role: str, worker_class: Any, fleet: Fleet, master: tuple[str, int], target: str = "") -> None:
        self.role, self._fleet = role, fleet
        self._worker_class, self._master, self._target = worker_class, master, target
        self._workers = [member.actor for member in fleet.members]
        self._worker_names = worker_names(role, len(fleet.members))
        self._callers: dict[tuple[int, str], Any] = {}
        self._bind_worker_method(worker_class)

    # ---- colocated roles ---------------------------------------------------------------------------------------

    def spawn(self, prefix_set: Iterable[str]) -> dict[str, RayWorkerGroup]:
        """One group per role of a colocated class, over the same workers, with the roles' own method names."""
        roles = self._worker_class.class_dict if issubclass(self._worker_class, ColocatedWorker) else {}
        groups = {}
        for role in prefix_set:
            if role not in roles:
                raise WorkerError(
                    f"no role {role!r} lives in this group", allowed=list(roles), fix=suggest(role, roles)
                )
            group = type(self).__new__(type(self))
            WorkerGroup.__init__(group, self.resource_pool)
            group._register_seconds = self._register_seconds
            group._attach(role, roles[role].cls, self._fleet, self._master, target=role)
            groups[role] = group
        return groups

    def spawn_fused(self, prefix_set: Iterable[str]) -> dict[str, RayWorkerGroup]:
        """As `spawn`, for a class of `create_colocated_worker_cls_fused`."""
        return self.spawn(prefix_set)

    def fuse(self, prefix_set: Iterable[str]) -> None:
        """Give this group one attribute per role, the role's own group: ``group.actor.update_actor(batch)``."""
        self.wg_dict = self.spawn(prefix_set)
        for role, group in self.wg_dict.items():
            setattr(self, role, group)

    # ---- calls -------------------------------------------------------------------------------------------------

    def execute_all(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        return self._send(method_name, self.spread(args, kwargs))

    def execute_rank_zero(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        return self._send(method_name, [(args, kwargs)])[0]

    def wait(self, references: object) -> Any:
        """The values behind references; after a failure the workers that are still busy with the call are remembered.

        Raises:
            WorkerError: a worker died.
            Exception: what a worker raised, with its traceback as the cause.
        """
        try:
            results = super().wait(references)
        except Exception:  # whatever a worker raised: it passes on
            self._fleet.remember_unfinished(references if isinstance(references, list) else [references])
            raise
        transfer.count_results(results)
        return results

    def handle(self, rank: int = 0, timeout: float | None = None, max_concurrency: int = 1) -> RayHandle:
        """The asynchronous form of one worker: its async methods run concurrently, plain ones in order."""
        if max_concurrency != 1:
            raise WorkerError(
                "the plain methods of a worker run one at a time",
                got=max_concurrency,
                fix="Make the method async, or host the object with host_object(max_concurrency=...).",
            )
        return RayHandle(self._workers[rank], self._target, self._worker_names[rank], timeout, self._fleet)

    def start_helpers(
        self, class_with_init: ClassWithInitArgs, number: int, name: str, seed: int = 0
    ) -> list[RayHandle]:
        recipe = LaunchPlan(
            role=name,
            class_with_init=RayClassWithInitArgs.of(class_with_init),
            seed=seed,
            register_seconds=self._register_seconds,
            behind_handle=True,
        )
        fleet, _ = launch(recipe, [None] * number)
        self._fleet.helpers.append(fleet)
        return [RayHandle(member.actor, "", member.name, None, fleet) for member in fleet.members]

    def _send(self, method_name: str, calls: Sequence[transfer.Call]) -> list[Any]:
        """Start a method on the first workers, one call each, in the order of their ranks."""
        transfer.count_calls(calls)
        shared = transfer.share(calls)
        fleet, references = self._fleet, []
        with fleet.sending:
            for rank, (args, kwargs) in enumerate(shared):
                caller = self._callers.get((rank, method_name))
                if caller is None:
                    named = f"{self._worker_names[rank]}.{method_name}"
                    caller = self._callers[rank, method_name] = self._workers[rank].call.options(name=named)
                header = [fleet.caller_id, fleet.sent[rank], self._target, method_name]
                references.append(caller.remote(header, *args, **kwargs))
                fleet.sent[rank] += 1  # a call that could not be sent has no number
        return references

    def shares_processes(self, other: WorkerGroup) -> bool:
        return isinstance(other, RayWorkerGroup) and self._fleet is other._fleet

    # ---- the processes -----------------------------------------------------------------------------------------

    @property
    def master_address(self) -> str:
        """Address of rank 0, for process groups; the loopback where all workers share a node."""
        return self._master[0]

    @property
    def master_port(self) -> str:
        return str(self._master[1])

    @property
    def node_ids(self) -> list[str]:
        """The id of each worker's node, by rank."""
        return [member.node_id for member in self._fleet.members]

    @property
    def addresses(self) -> list[str]:
        """The address of each worker's node, by rank."""
        return [member.address for member in self._fleet.members]

    def placement(self) -> str:
        """One line per worker: its node and process."""
        return "\n".join(
            f"{name}: node {member.node_id} ({member.address}), process {member.pid}"
            for name, member in zip(self._worker_names, self._fleet.members)
        )

    def look_at_processes(self) -> list[Process]:
        return self._fleet.look_at()

    def close(self) -> None:
        """Stop the workers, also detached ones, and those of every group that shares their processes."""
        self._fleet.close()

    def start_worker_aliveness_check(self, every_n_seconds: float = 1) -> None:
        """Runs from the start; with another interval only after `stop_worker_aliveness_check`."""
        self._fleet.watch(every_n_seconds)

    def stop_worker_aliveness_check(self) -> None:
        self._fleet.stop_watching()

    def check_alive(self) -> None:
        """Raise if a worker died, the group was closed, or a worker never came back from a call that failed."""
        self._fleet.check()

    def _is_worker_alive(self, worker: Any) -> bool:
        return next(self._fleet.is_alive(m) for m in self._fleet.members if m.actor is worker)


def _attached(role: str, names: Sequence[str] | None, handles: Sequence[Any] | None) -> tuple[Fleet, tuple[str, int]]:
    transfer.install_transfer()
    actors = list(handles or ()) or [_named_actor(name) for name in names or ()]
    intros = failures.fetch_references([actor.introduce.remote() for actor in actors])
    described = failures.fetch_references([actors[0].describe.remote()])[0]
    members = [
        Member(name, actor, one["node_id"], one["address"], one["pid"], one["logs"])
        for name, actor, one in zip(worker_names(role, len(actors)), actors, intros)
    ]
    return Fleet(role, members), described["master"]


def _names_of(prefix: str) -> list[str]:
    first = _named_actor(worker_names(prefix, 1)[0])
    return worker_names(prefix, failures.fetch_references([first.describe.remote()])[0]["world_size"])


def _named_actor(name: str) -> Any:
    try:
        return ray.get_actor(name)
    except ValueError:
        names = ray.util.list_named_actors()
        raise WorkerError(
            f"no detached worker {name!r} runs on this cluster",
            allowed=names or "there are none",
            fix=suggest(name, names) or "Workers are found in the Ray namespace in which they were made.",
        ) from None
