"""The TorchTitan backend."""

from verl.engines.torchtitan.engine import TorchTitanEngine

__all__ = ["TorchTitanEngine"]
