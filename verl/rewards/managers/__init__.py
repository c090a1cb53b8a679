"""Reward managers: a batch in, token-level scores out. The classes load when the registry is asked for them."""

from verl.rewards.loading import load_reward_manager, resolve_reward_manager_cls

__all__ = ["load_reward_manager", "resolve_reward_manager_cls"]
