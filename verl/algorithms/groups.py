"""Statistics over the responses of one prompt.

Groups are keyed by the prompt's id, never by position: they may be ragged and in any order. Shapes: B rows, G groups.
Everything is float64 inside (B numbers only), so that the order of the rows does not show.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from verl.algorithms.masked import zero_outside
from verl.errors import ConfigError
from verl.metrics import notice

Singleton = Literal["zero", "raw"]
SAME = 1e-8
"""Float rewards closer than this are equal."""


@dataclass(frozen=True)
class Groups:
    """Which rows belong together.

    Args:
        ids: (B,) int64, the number of each row's group, 0 .. G - 1.
        counted: (B,) bool, the rows that take part in the statistics; a row without a finite score does not.
        num_groups: G.
    """

    ids: Tensor
    counted: Tensor
    num_groups: int

    @classmethod
    def of(cls, index: Sequence[Hashable] | Tensor, counted: Tensor) -> Groups:
        """Groups from the prompt id of each row (any hashable; an integer tensor works too)."""
        keys = index.tolist() if isinstance(index, Tensor | np.ndarray) else index
        if len(keys) != len(counted):
            raise ValueError(f"{len(keys)} group ids for {len(counted)} rows")
        numbers = dict(zip(dict.fromkeys(keys), itertools.count()))
        ids = list(map(numbers.__getitem__, keys))
        return cls(torch.tensor(ids, dtype=torch.int64, device=counted.device), counted, len(numbers))

    def sum(self, values: Tensor) -> Tensor:
        """(B,) -> (B,): the sum over the counted rows of each row's group."""
        totals = torch.zeros(self.num_groups, dtype=torch.float64, device=values.device)
        totals.index_add_(0, self.ids, torch.where(self.counted, values.double(), 0.0))
        return totals[self.ids]

    def size(self) -> Tensor:
        """(B,) float64: how many counted rows each row's group has."""
        return self.sum(torch.ones_like(self.ids, dtype=torch.float64))

    def centre(self, values: Tensor) -> Tensor:
        """(B,): value minus the mean of its group; exactly 0 where all counted values of the group are equal."""
        # Relative to one member, equal values are exact zeros, and a large common offset costs no digits.
        rows = torch.arange(len(self.ids), device=values.device)
        first = torch.full((self.num_groups,), len(rows), dtype=torch.int64, device=values.device)
        first.scatter_reduce_(0, self.ids, torch.where(self.counted, rows, len(rows)), "amin")
        reference = torch.cat([values.double(), values.new_zeros(1).double()])[first]
        relative = values.double() - reference[self.ids]
        return relative - self.sum(relative) / self.size().clamp(min=1)

    def max(self, values: Tensor, among: Tensor) -> Tensor:
        """(B,) -> (B,): the largest value of each row's group among the counted rows where ``among`` (B,) is true.

        -inf where there is none.
        """
        largest = torch.full((self.num_groups,), -torch.inf, dtype=torch.float64, device=values.device)
        candidates = torch.where(among & self.counted, values.double(), -torch.inf)
        return largest.scatter_reduce_(0, self.ids, candidates, "amax")[self.ids]

    def std(self, centred: Tensor) -> Tensor:
        """(B,): the sample standard deviation (n - 1) of each row's group, from values that `centre` returned."""
        return (self.sum(centred**2) / (self.size() - 1).clamp(min=1)).sqrt()


def outcome_scores(token_level_rewards: Tensor, response_mask: Tensor) -> Tensor:
    """(B,) float64: the sum of each row's token rewards.

    Rewards outside the mask count if they are finite, because older reward managers write the score on the last
    attended token, which may be an observation. A row whose rewards inside the mask are not finite has a NaN score.
    """
    scores = token_level_rewards.double().sum(dim=-1)
    if scores.isfinite().all():  # then every reward is finite, and all of them count
        return scores
    rewards = token_level_rewards.double()
    return torch.where(response_mask.bool() | rewards.isfinite(), rewards, 0.0).sum(dim=-1)


def settle_singletons(advantage: Tensor, raw: Tensor, groups: Groups, singleton: Singleton) -> Tensor:
    """Give groups of one what ``algorithm.singleton`` says: 0 (no baseline, no signal) or the raw score.

    Args:
        advantage: (B,) what the estimator found; rows that are not counted become 0.
        raw: (B,) what a group of one gets under ``raw``.
    """
    if singleton not in get_args(Singleton):
        raise ConfigError(
            "unknown treatment of a group of one", key="algorithm.singleton", got=singleton, allowed=get_args(Singleton)
        )
    alone = groups.size() == 1
    if (alone & groups.counted).any():
        instead = "0" if singleton == "zero" else "its raw score"
        why = "no prompt has more: set actor_rollout_ref.rollout.n to 2 or more"
        if bool((groups.size() > 1).any()):
            why = "others have more, so its other samples could not be scored (reward/unscorable) or were left out"
        notice(
            "algorithm.singleton",
            f"a prompt has a single scored response, so nothing to compare it with; its advantage is {instead}. "
            f"In this batch {why}.",
        )
    settled = torch.where(alone, raw if singleton == "raw" else torch.zeros_like(raw), advantage)
    return torch.where(groups.counted, settled, 0.0)


def spread_over_tokens(advantage: Tensor, response_mask: Tensor, dtype: torch.dtype) -> Tensor:
    """(B,) -> (B, T): one finite advantage per row on each of its valid tokens, 0 elsewhere, in at least float32."""
    wide = torch.promote_types(dtype, torch.float32)
    return zero_outside(advantage[:, None].to(wide), response_mask)


def lengths_of(response_mask: Tensor) -> Tensor:
    """(B,) float64: the valid tokens of each row."""
    return response_mask.sum(dim=-1).double()


def same_outcome(groups: np.ndarray, columns: list[np.ndarray], left_out: np.ndarray) -> np.ndarray:
    """(G,) bool: groups of several samples in which no column varies by more than rounding.

    Args:
        groups: (B,) int, of each row, 0 .. G - 1.
        columns: each (B,); a group is kept if any of them varies.
        left_out: (B,) rows that do not count.
    """
    num_groups = int(groups.max()) + 1 if len(groups) else 0
    varies = np.zeros(num_groups, dtype=bool)
    for values in columns:
        counted = ~left_out & ~np.isnan(values)
        low, high = np.full(num_groups, np.inf), np.full(num_groups, -np.inf)
        np.minimum.at(low, groups[counted], values[counted])
        np.maximum.at(high, groups[counted], values[counted])
        varies |= high - low > SAME
    return ~varies & (np.bincount(groups, minlength=num_groups) > 1)


def group_means(groups: np.ndarray, values: np.ndarray, left_out: np.ndarray) -> np.ndarray:
    """(G,) float64: the mean of each group's counted values, NaN where it has none."""
    counted = ~left_out & ~np.isnan(values)
    number = np.bincount(groups, weights=counted)
    total = np.bincount(groups, weights=np.where(counted, values, 0.0))
    return np.divide(total, number, out=np.full(len(number), np.nan), where=number > 0)
