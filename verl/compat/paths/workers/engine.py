"""Training backends under upstream's path."""

from collections.abc import Callable
from typing import Any

from verl.engines.base import Engine as BaseEngine
from verl.registry import ENGINES


class EngineRegistry:
    """Names for ``actor.strategy``; one class serves every kind of model and device."""

    @staticmethod
    def register(model_type: str, backend: list[str] | str, device: Any = "cuda") -> Callable[[type], type]:
        def add(engine: type) -> type:
            for name in [backend] if isinstance(backend, str) else backend:
                ENGINES.register(name)(engine)
            return engine

        return add
