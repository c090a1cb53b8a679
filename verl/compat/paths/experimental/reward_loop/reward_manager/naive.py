"""The manager `naive` for one row, under upstream's newer path."""

from verl.rewards.managers.single import NaiveRowManager as NaiveRewardManager
