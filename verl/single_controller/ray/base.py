"""The public names of the Ray runtime under upstream's import path."""

from verl.single_controller.ray.class_with_args import (
    RayClassWithInitArgs,
    create_colocated_worker_cls,
    create_colocated_worker_cls_fused,
)
from verl.single_controller.ray.resource_pool import (
    RayResourcePool,
    SubRayResourcePool,
    extract_pg_from_exist,
    merge_resource_pool,
    split_resource_pool,
)
from verl.single_controller.ray.worker_group import RayWorkerGroup

__all__ = [
    "RayClassWithInitArgs",
    "RayResourcePool",
    "RayWorkerGroup",
    "SubRayResourcePool",
    "create_colocated_worker_cls",
    "create_colocated_worker_cls_fused",
    "extract_pg_from_exist",
    "merge_resource_pool",
    "split_resource_pool",
]
