"""Memory of the device under upstream's path."""

import gc

from verl import device


def aggressive_empty_cache(force_sync: bool = True, max_retries: int = 3) -> None:
    """Collect garbage and give freed memory back to the machine."""
    gc.collect()
    device.give_memory_back(device.resolve_device(None))
