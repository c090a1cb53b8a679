"""The plain engine over a module that somebody else has built, for code that brings its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from verl.config import FSDPEngineConfig, HFModelConfig, OptimizerConfig
from verl.engines.plain import PlainEngine


class GivenModuleEngine(PlainEngine):
    """Trains ``module`` in place, with ``optimizer``; its learning rate is the optimizer's own and stays as it is.

    The module keeps the attention that training puts into it.

    Args:
        module: a causal language model of transformers, whole, on one device.
        optimizer: over the module's parameters; None freezes it.
        engine: the ``fsdp_config`` section; ``dtype`` is that of the products.
        grad_clip: largest gradient norm.
    """

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer | None, engine: FSDPEngineConfig, grad_clip: float
    ):
        self._module, self._optimizer = module, optimizer
        device = next(module.parameters()).device.type
        optim = None if optimizer is None else OptimizerConfig()
        super().__init__(HFModelConfig(), engine, optim, grad_clip=grad_clip, device=device)

    def _load(self, *_: Any, **__: Any) -> nn.Module:
        self.architecture = type(self._module).__name__
        return self._module

    def _build_optimizer(self, *_: Any) -> torch.optim.Optimizer:
        assert self._optimizer is not None, "a frozen engine builds none"
        return self._optimizer
