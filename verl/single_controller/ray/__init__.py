"""The runtime on a Ray cluster: the same groups, handles and pools as `local`, with workers in processes of their own.

Nothing is imported until a name is used: worker processes import this package before their environment is set,
and libraries read it when they are loaded.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from verl.errors import MissingDependencyError

_HOME = {
    "Fleet": "fleet",
    "RayClassWithInitArgs": "class_with_args",
    "RayHandle": "handle",
    "RayResourcePool": "resource_pool",
    "RayWorkerGroup": "worker_group",
    "SubRayResourcePool": "resource_pool",
    "create_colocated_worker_cls": "class_with_args",
    "create_colocated_worker_cls_fused": "class_with_args",
    "extract_pg_from_exist": "resource_pool",
    "host_object": "handle",
    "merge_resource_pool": "resource_pool",
    "split_resource_pool": "resource_pool",
    "start_cluster": "runtime",
    "stop_cluster": "runtime",
}
__all__ = [
    "Fleet",
    "RayClassWithInitArgs",
    "RayHandle",
    "RayResourcePool",
    "RayWorkerGroup",
    "SubRayResourcePool",
    "create_colocated_worker_cls",
    "create_colocated_worker_cls_fused",
    "extract_pg_from_exist",
    "host_object",
    "merge_resource_pool",
    "split_resource_pool",
    "start_cluster",
    "stop_cluster",
]

if importlib.util.find_spec("ray") is None:
    raise MissingDependencyError(
        "the Ray runtime needs the package ray, which is not installed",
        key="trainer.runtime",
        fix="In the checkout: pip install -e '.[ray]', or set trainer.runtime=local to run in this process.",
    )


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
