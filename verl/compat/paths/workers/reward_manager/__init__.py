"""Reward managers under upstream's import path."""

from verl.registry import REWARD_MANAGERS
from verl.rewards.managers.abstract import AbstractRewardManager
from verl.rewards.managers.batch import BatchRewardManager
from verl.rewards.managers.dapo import DAPORewardManager
from verl.rewards.managers.naive import NaiveRewardManager
from verl.rewards.managers.prime import PrimeRewardManager


def register(name: str):
    """Decorator that makes a manager known as ``reward.reward_manager.name``."""
    return REWARD_MANAGERS.register(name)


def get_reward_manager_cls(name: str) -> type:
    """The class of a registered, built-in or dotted name."""
    return REWARD_MANAGERS.get(name)
