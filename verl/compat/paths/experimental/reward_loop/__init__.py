"""Rewards of a batch under upstream's newer import path."""

from typing import Any

from verl.protocol import DataProto
from verl.rewards.loading import load_reward_manager


class RewardLoopManager:
    """Scores batches with the reward manager of a configuration; ``rm_resource_pool`` is not needed for functions."""

    def __init__(self, config: Any, rm_resource_pool: Any = None):
        from verl.data import tokenizer_of

        self.config = config
        self.manager = load_reward_manager(config, tokenizer_of(config.actor_rollout_ref.model))

    def compute_rm_score(self, data: DataProto) -> DataProto:
        """``rm_scores`` (B, T), and what the scorer said of each row as columns."""
        scored = self.manager(data, return_dict=True)
        return DataProto.from_dict({"rm_scores": scored["reward_tensor"]}, scored["reward_extra_info"])


def migrate_legacy_reward_impl(config: Any) -> Any:
    """The configuration as it is: settings of older releases have their new places since it was read."""
    return config
