"""The two numeric fixtures of the specification, and random ragged batches for property tests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

UIDS = np.array(list("aaaabbc"), dtype=object)
SCORES = [1.0, 0.0, 0.5, 0.0, 1.0, 1.0, 0.7]
LENGTHS = [3, 2, 4, 1, 2, 2, 1]


def outcome_batch(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, np.ndarray]:
    """Rewards (7, 4) at the last valid token, mask, uid: group a is normal, all of b are equal, c is alone."""
    mask = (torch.arange(4)[None] < torch.tensor(LENGTHS)[:, None]).long()
    rewards = torch.zeros(7, 4, dtype=dtype)
    rewards[torch.arange(7), torch.tensor(LENGTHS) - 1] = torch.tensor(SCORES, dtype=dtype)
    return rewards, mask, UIDS


def loss_batch(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Two rows with ratios [[1, 1.5, .5], [.7, 5, masked]] and advantages +1 and -1."""
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    old = torch.tensor([[-1.0, -1, -1], [-2, -2, -2]], dtype=dtype)
    ratio = torch.tensor([[1.0, 1.5, 0.5], [0.7, 5, 1]], dtype=dtype)
    advantages = torch.tensor([[1.0, 1, 1], [-1, -1, -1]], dtype=dtype)
    return {
        "old_log_prob": old,
        "log_prob": (old + ratio.log()).requires_grad_(),
        "advantages": advantages,
        "response_mask": mask,
    }


def actor_config(**changes: Any) -> SimpleNamespace:
    """The settings of an actor that losses read, with the specification's clip range unless changed."""
    settings = {
        "clip_ratio": 0.2,
        "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.28,
        "clip_ratio_c": 3.0,
        "loss_agg_mode": "token-mean",
        "loss_scale_factor": None,
        "entropy_coeff": 0.0,
        "calculate_entropy": False,
        "use_kl_loss": False,
        "kl_loss_coef": 0.001,
        "kl_loss_type": "low_var_kl",
        "positive_lm_coef": 0.0,
        "tau_pos": 1.0,
        "tau_neg": 1.05,
        "policy_loss": policy_loss_config(),
    }
    return SimpleNamespace(**{**settings, **changes})


def policy_loss_config(**changes: Any) -> SimpleNamespace:
    """The section ``policy_loss`` of an actor with its defaults."""
    settings = {
        "loss_mode": "vanilla",
        "clip_cov_ratio": 2e-4,
        "clip_cov_lb": 1.0,
        "clip_cov_ub": 5.0,
        "kl_cov_ratio": 2e-4,
        "ppo_kl_coef": 0.1,
        "dro_beta": None,
        "rollout_correction": None,
    }
    return SimpleNamespace(**{**settings, **changes})


def ragged_mask(generator: torch.Generator, rows: int, width: int, holes: bool = True) -> Tensor:
    """(rows, width) int64 with lengths from 0 to ``width``, and masked tokens in between with ``holes``."""
    lengths = torch.randint(0, width + 1, (rows,), generator=generator)
    mask = (torch.arange(width)[None] < lengths[:, None]).long()
    if holes:
        mask = mask * (torch.rand(rows, width, generator=generator) > 0.2)
    return mask


def poison(values: Tensor, mask: Tensor) -> Tensor:
    """The same values with NaN wherever the mask is 0."""
    return torch.where(mask.bool(), values, torch.nan)
