"""Names of reward managers under upstream's path."""

from verl.workers.reward_manager import get_reward_manager_cls, register
