"""Megatron's optimizer under upstream's path."""

from typing import Any


def get_megatron_last_lr(optimizer: Any) -> float:
    """The learning rate of the next step."""
    return optimizer.param_groups[0]["lr"]
