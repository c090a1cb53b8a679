"""Weights on their way from a trainer to samplers: buckets with a version, checks, transports, differences."""

from verl.weight_sync.chunks import WeightChunk, chunk_weights
from verl.weight_sync.collective import BroadcastTransport
from verl.weight_sync.cuda_ipc import CudaIpcTransport
from verl.weight_sync.delta import DeltaDecoder, DeltaEncoder
from verl.weight_sync.delta_transport import DeltaTransport
from verl.weight_sync.disk import DiskTransport
from verl.weight_sync.fan_out import StreamReceiver, deliver
from verl.weight_sync.inventory import WeightInventory
from verl.weight_sync.shared_memory import SharedMemoryTransport
from verl.weight_sync.transport import Transport

__all__ = [
    "BroadcastTransport",
    "CudaIpcTransport",
    "DeltaDecoder",
    "DeltaEncoder",
    "DeltaTransport",
    "DiskTransport",
    "SharedMemoryTransport",
    "StreamReceiver",
    "Transport",
    "WeightChunk",
    "WeightInventory",
    "chunk_weights",
    "deliver",
]
