"""The base of asynchronous reward managers under upstream's import path."""

from verl.rewards.managers.loop import RewardManagerBase
