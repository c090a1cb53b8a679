"""The runtime in this process: breakpoints work, nothing is started, the numbers are those of a remote worker."""

from verl.single_controller.base.colocated import colocated_class as create_colocated_worker_cls
from verl.single_controller.local.handle import LocalHandle
from verl.single_controller.local.worker_group import LocalWorkerGroup

__all__ = ["LocalHandle", "LocalWorkerGroup", "create_colocated_worker_cls"]
