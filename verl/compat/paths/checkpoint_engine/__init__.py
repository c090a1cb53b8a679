"""Transports of weights under upstream's path; they live in `verl.weight_sync`."""

from verl.compat import absent_names
from verl.registry import TRANSPORTS as CheckpointEngineRegistry
from verl.weight_sync.transport import Transport as CheckpointEngine

__getattr__ = absent_names(__name__)
