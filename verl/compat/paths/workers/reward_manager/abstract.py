"""The contract of reward managers under upstream's import path."""

from verl.rewards.managers.abstract import AbstractRewardManager, RawRewardFn
