"""The manager `dapo` under upstream's path."""

from verl.rewards.managers.dapo import DAPORewardManager
