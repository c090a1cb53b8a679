"""Base classes of ``data.sampler``: an order of the training prompts, and one that learns from every step."""

from abc import abstractmethod
from collections.abc import Sized
from typing import Any

from torch.utils.data import Sampler


class AbstractSampler(Sampler[int]):
    """Yields row numbers of the training data, one epoch per ``iter``."""

    @abstractmethod
    def __init__(self, data_source: Sized, data_config: Any):
        """``data_source``: the training data; ``data_config``: the ``data`` section."""


class AbstractCurriculumSampler(AbstractSampler):
    """An order that depends on what was learned; ``state_dict`` and ``load_state_dict`` keep it over a resume."""

    @abstractmethod
    def update(self, batch: Any) -> None:
        """Take in the `DataProto` of a step, once the policy is updated."""
