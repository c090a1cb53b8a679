"""What every runtime shares: tagged methods, workers, worker groups, pools, roles and handles."""

from verl.single_controller.base.colocated import ColocatedWorker, colocated_class
from verl.single_controller.base.decorator import (
    Dispatch,
    Execute,
    get_predefined_dispatch_fn,
    get_predefined_execute_fn,
    make_nd_compute_dataproto_dispatch_fn,
    make_nd_compute_metric_dispatch_fn,
    register,
    register_dispatch_mode,
    update_dispatch_mode,
)
from verl.single_controller.base.dispatch import CallOptions
from verl.single_controller.base.handle import Handle
from verl.single_controller.base.resources import ClassWithInitArgs, ResourcePool, ResourcePoolManager
from verl.single_controller.base.rng import RngState, worker_seed
from verl.single_controller.base.roles import Role, RoleKind
from verl.single_controller.base.worker import Worker, WorkerInfo, build_worker
from verl.single_controller.base.worker_group import WorkerGroup, by_rank, collected

__all__ = [
    "CallOptions",
    "ClassWithInitArgs",
    "ColocatedWorker",
    "Dispatch",
    "Execute",
    "Handle",
    "ResourcePool",
    "ResourcePoolManager",
    "RngState",
    "Role",
    "RoleKind",
    "Worker",
    "WorkerGroup",
    "WorkerInfo",
    "build_worker",
    "by_rank",
    "collected",
    "colocated_class",
    "get_predefined_dispatch_fn",
    "get_predefined_execute_fn",
    "make_nd_compute_dataproto_dispatch_fn",
    "make_nd_compute_metric_dispatch_fn",
    "register",
    "register_dispatch_mode",
    "update_dispatch_mode",
    "worker_seed",
]
