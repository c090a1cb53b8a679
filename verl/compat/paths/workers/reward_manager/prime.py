"""The manager `prime` under upstream's path."""

from verl.rewards.managers.prime import PrimeRewardManager
