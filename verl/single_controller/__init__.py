"""One controller, many workers: `base` holds what every runtime shares, `local` runs the workers in this process.

Further runtimes (torchrun, a Ray cluster) are packages beside `local` that implement `WorkerGroup` and `Handle`.
"""

__all__ = ["ClassWithInitArgs", "ResourcePool", "Worker", "WorkerGroup"]


def __getattr__(name: str):
    # Loaded on demand: a program that looks at its Ray cluster first must not wait for torch.
    if name in __all__:
        from verl.single_controller import base

        return getattr(base, name)
    raise AttributeError(f"module 'verl.single_controller' has no attribute {name!r}")
