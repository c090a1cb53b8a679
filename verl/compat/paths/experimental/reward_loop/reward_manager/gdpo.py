"""The manager `gdpo` for one row, under upstream's newer path."""

from verl.rewards.managers.single import GDPORowManager as GDPORewardManager
