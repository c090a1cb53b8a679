"""GDPO's manager in the asynchronous form, under upstream's newer path."""

from verl.experimental.reward_loop.reward_manager import naive
from verl.rewards.managers import gdpo


class GDPORewardManager(naive.NaiveRewardManager):
    """Wants rewards with names."""

    of = gdpo.GDPORewardManager
