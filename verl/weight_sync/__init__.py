"""Weights on their way from a trainer to samplers: buckets with a version, checks, transports."""

from verl.weight_sync.chunks import WeightChunk, chunk_weights
from verl.weight_sync.inventory import WeightInventory
from verl.weight_sync.same_process import SameProcessTransport, WeightReceiver

__all__ = ["SameProcessTransport", "WeightChunk", "WeightInventory", "WeightReceiver", "chunk_weights"]
