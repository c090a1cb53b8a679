"""How a run finds its reward function and manager, under upstream's import path."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from verl.rewards.loading import get_custom_reward_fn, load_reward_manager, resolve_reward_manager_cls

if TYPE_CHECKING:
    import torch

    from verl.protocol import DataProto


def extract_reward(batch: DataProto) -> tuple[torch.Tensor, dict[str, Any]]:
    """The scores that a batch carries as ``rm_scores`` (B, T), and the columns that came with them."""
    from verl.rewards.managers.base import given_scores

    given = given_scores(batch)
    return given["reward_tensor"], given["reward_extra_info"]
