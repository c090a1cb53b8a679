"""The manager `dapo` for one row, under upstream's newer path."""

from verl.rewards.managers.single import DAPORowManager as DAPORewardManager
