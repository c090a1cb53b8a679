"""The contract of a reward manager, as users' own managers subclass it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from verl.protocol import DataProto
from verl.protocol.tokenizer import Tokenizer

RawRewardFn = Callable[..., Any]
"""A user's reward function, in any form."""


class AbstractRewardManager(ABC):
    """Scores a batch.

    A manager of one's own subclasses this, is registered (``verl.workers.reward_manager.register``) or named by
    ``reward.reward_manager`` (a dotted path, or ``source=importlib`` with ``module.path``), and gets what
    ``reward.reward_kwargs`` holds as further arguments.
    """

    @abstractmethod
    def __init__(
        self,
        tokenizer: Tokenizer,
        num_examine: int,
        compute_score: Callable[..., Any] | None,
        reward_fn_key: str = "data_source",
        **kwargs: Any,
    ): ...

    @abstractmethod
    def __call__(self, data: DataProto, return_dict: bool = False) -> torch.Tensor | dict[str, Any]:
        """Token-level scores (B, T) float32, or ``{"reward_tensor": scores, "reward_extra_info": {name: list}}``."""
