"""One controller, many workers: `base` holds what every runtime shares, `local` runs the workers in this process.

Further runtimes (torchrun, a Ray cluster) are packages beside `local` that implement `WorkerGroup` and `Handle`.
"""

from verl.single_controller.base import ClassWithInitArgs, ResourcePool, Worker, WorkerGroup

__all__ = ["ClassWithInitArgs", "ResourcePool", "Worker", "WorkerGroup"]
