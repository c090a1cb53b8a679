"""Operations per second, under upstream's path; `verl.models.flops` counts them."""

from collections.abc import Iterable
from typing import Any

from verl import device
from verl.models.flops import ModelFlops, device_peak_flops


def get_device_flops(unit: str = "T", device_name: str | None = None) -> float:
    """The peak of the device in bfloat16, in ``unit`` (G, T or P) per second; infinite where it is not known."""
    name = device_name or device.device_name(device.resolve_device(None))
    return (device_peak_flops(name) or float("inf")) / {"G": 1e9, "T": 1e12, "P": 1e15}[unit]


class FlopsCounter:
    """Counts for a model of transformers; ``config`` is its configuration."""

    def __init__(self, config: Any):
        self.flops = ModelFlops.of(config)

    def estimate_flops(
        self, batch_seqlens: Iterable[int], delta_time: float, forward_only: bool = False
    ) -> tuple[float, float]:
        """(operations per second that training on these lengths took, the device's peak), both in 1e12."""
        count = self.flops.forward if forward_only else self.flops.train
        return count(batch_seqlens) / delta_time / 1e12, get_device_flops()
