"""Training with Megatron-Core."""

from verl.engines.megatron.engine import MegatronEngine

__all__ = ["MegatronEngine"]
