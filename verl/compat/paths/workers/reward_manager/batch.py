"""The manager `batch` under upstream's path."""

from verl.rewards.managers.batch import BatchRewardManager
