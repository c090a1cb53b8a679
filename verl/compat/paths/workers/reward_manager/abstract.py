"""The contract of reward managers under upstream's import path."""

from collections.abc import Callable
from typing import Any

from verl.rewards.managers.abstract import AbstractRewardManager

RawRewardFn = Callable[..., Any]
