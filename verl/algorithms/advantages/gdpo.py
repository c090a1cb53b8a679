"""Group reward-decoupled normalisation for several rewards (GDPO, arXiv 2601.05242)."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.algorithms.groups import Groups, Singleton, lengths_of, settle_singletons, spread_over_tokens
from verl.algorithms.whitening import whitened_rows
from verl.config.schema.algorithm import AlgoConfig
from verl.errors import ConfigError, suggest


@torch.no_grad()
def gdpo(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Sequence[Hashable],
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: AlgoConfig | None = None,
    non_tensor_batch: Mapping[str, Any] | None = None,
    batch: Mapping[str, Sequence[float]] | None = None,
    singleton: Singleton = "zero",
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Every reward is compared within the group by itself, so that a large one does not drown a small one.

    With r^k the rewards that the scorer returned under ``algorithm.gdpo_reward_keys``, w their weights, mu and sigma
    the mean and the sample standard deviation (n - 1) of a group::

        a^k_i = (r^k_i - mu^k) / (sigma^k + epsilon)        (without the division if norm_adv_by_std_in_grpo is false)
        S_i   = sum_k w_k a^k_i
        advantages = (S - mean) / std                       (over all valid tokens of the batch)

    Args:
        token_level_rewards, response_mask: (B, T); the rewards give dtype and nothing else.
        index: (B,) prompt id of each row.
        config: the section ``algorithm``, for ``gdpo_reward_keys`` and ``gdpo_reward_weights`` (ones).
        non_tensor_batch: holds each key's column, (B,) numbers.
        singleton: before whitening a group of one has 0, or with ``raw`` each component as in `grpo`.

    Returns:
        advantages and returns, which are the same here: (B, T), at least float32.

    Raises:
        ConfigError: no keys, another number of weights, or a key that the scorer did not return.
    """
    keys, weights = components(config)
    columns = [_column(key, non_tensor_batch or {}, response_mask.device) for key in keys]
    groups = Groups.of(index, torch.stack(columns).isfinite().all(dim=0))
    total = torch.zeros_like(columns[0])
    for rewards, weight in zip(columns, weights):
        centred = groups.centre(rewards)
        scale = groups.std(centred) + epsilon if norm_adv_by_std_in_grpo else 1.0
        raw = rewards / (1.0 + epsilon) if norm_adv_by_std_in_grpo else rewards
        total = total + weight * settle_singletons(centred / scale, raw, groups, singleton)
    advantage = whitened_rows(total, lengths_of(response_mask) * groups.counted) * groups.counted
    advantages = spread_over_tokens(advantage, response_mask, token_level_rewards.dtype)
    return advantages, advantages


def components(config: AlgoConfig | None) -> tuple[list[str], list[float]]:
    """The keys and weights of the rewards in the configuration."""
    keys = None if config is None else config.gdpo_reward_keys
    if config is None or not keys:
        raise ConfigError(
            "the estimator gdpo normalises several rewards separately, and none is named",
            key="algorithm.gdpo_reward_keys",
            got=keys,
            fix="List the keys that your scorer returns, e.g. algorithm.gdpo_reward_keys=[accuracy,format].",
        )
    weights = [1.0] * len(keys) if config.gdpo_reward_weights is None else list(config.gdpo_reward_weights)
    if len(weights) != len(keys):
        raise ConfigError(
            f"{len(keys)} rewards have {len(weights)} weights",
            key="algorithm.gdpo_reward_weights",
            got=weights,
            allowed=f"one number for each of {list(keys)}",
        )
    return list(keys), [float(weight) for weight in weights]


def _column(key: str, columns: Mapping[str, Any], device: torch.device) -> Tensor:
    if key not in columns:
        raise ConfigError(
            "the scorer returned no such reward",
            key="algorithm.gdpo_reward_keys",
            got=key,
            allowed=sorted(columns),
            fix=suggest(key, list(columns)) or "Return a dict with it from compute_score.",
        )
    return torch.from_numpy(np.asarray(columns[key], dtype=np.float64)).to(device)
