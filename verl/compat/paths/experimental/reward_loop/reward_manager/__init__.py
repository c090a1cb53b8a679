"""Reward managers under upstream's newer import path; there is one registry for both."""

from verl.rewards.managers.loop import RewardManagerBase
from verl.workers.reward_manager import get_reward_manager_cls, register
