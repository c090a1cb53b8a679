"""Optimizers under upstream's path."""

from typing import Any

from verl.config import FSDPOptimizerConfig, OptimizerConfig


def build_optimizer(parameters: Any, config: Any) -> Any:
    """The optimizer that a section ``optim`` describes."""
    from verl.device import resolve_device
    from verl.engines.optimizer import build_optimizer as build

    return build(parameters, config, resolve_device(None))
