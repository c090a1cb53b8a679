"""Training backends behind one abstract class."""

from verl.engines.base import Engine, EngineState

__all__ = ["Engine", "EngineState"]
