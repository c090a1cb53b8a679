"""Reward managers: a batch in, token-level scores out. The classes load on first use."""

from verl.rewards.loading import load_reward_manager, resolve_reward_manager_cls

__all__ = ["load_reward_manager", "resolve_reward_manager_cls"]
