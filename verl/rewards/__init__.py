"""Rewards: from a text to a score. Scorers by ``data_source``, users' functions, and the managers that score a batch.

Nothing here loads torch until a manager is loaded: a reward file can be checked in a second.
"""

from verl.rewards.dispatch import check_data_sources, default_compute_score
from verl.rewards.forms import Form
from verl.rewards.function import RewardFunction, load_reward_function
from verl.rewards.loading import (
    check_reward_data,
    get_custom_reward_fn,
    load_reward_manager,
    resolve_reward_manager_cls,
)
from verl.rewards.samples import RewardFailure, RewardResult, RewardSample
from verl.rewards.scoring import Scorer, ScoringLimits

__all__ = [
    "Form",
    "RewardFailure",
    "RewardFunction",
    "RewardResult",
    "RewardSample",
    "Scorer",
    "ScoringLimits",
    "check_data_sources",
    "check_reward_data",
    "default_compute_score",
    "get_custom_reward_fn",
    "load_reward_function",
    "load_reward_manager",
    "resolve_reward_manager_cls",
]
