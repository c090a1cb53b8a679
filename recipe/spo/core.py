"""SPO: the baseline of an answer is a value of its prompt, which the answers of earlier steps have formed.

Xu and Ding 2025 (arXiv 2509.13232). A reward r in [0, 1] is an outcome; a prompt's value is the mean of a Beta
distribution, in which each answer leaves rho of what was there before::

    a <- rho a + r        b <- rho b + 1 - r        v = a / (a + b)
    advantage of an answer = r - v of before it, normalised over the batch
    weight of a prompt in the next draw = sqrt(v (1 - v)) + floor

The window 1 / (1 - rho) is how many answers a value rests on in the long run. The values live in the dataset, which
writes them into its rows; the sampler draws by them, learns from every step, and saves them with the checkpoint.

Shapes: B rows, T response tokens, N prompts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.algorithms.groups import outcome_scores, spread_over_tokens
from verl.config.schema.root import prompts_at_once
from verl.data import RLHFDataset
from verl.data.settings import read
from verl.errors import ConfigError, DataError
from verl.experimental.dataset.sampler import AbstractCurriculumSampler
from verl.protocol import DataProto
from verl.protocol.fields import declare_field

VALUE, ITEM, PRIOR = "spo_value", "spo_item", "prior_value"
"""Columns: a prompt's value when it was taken, its number in the dataset; the share of right answers before the run."""
EPSILON = 1e-8
declare_field(VALUE, producer="dataset (ValuedPrompts)", doc="value of the prompt when it was taken")
declare_field(ITEM, producer="dataset (ValuedPrompts)", doc="number of the prompt in the dataset")


class PromptValues:
    """A Beta distribution for each prompt.

    Args:
        priors: (N,) what a value begins with, which counts as a whole window; NaN: a = b = 1.
        rho: what is left of earlier outcomes.
    """

    def __init__(self, priors: Sequence[float], rho: float):
        prior, window = np.asarray(priors, dtype=np.float64), 1 / (1 - rho)
        unknown = np.isnan(prior)
        self.rho = rho
        self.a, self.b = (np.where(unknown, 1.0, window * x) for x in (prior, 1 - prior))

    def values(self) -> np.ndarray:
        """(N,) v."""
        return self.a / (self.a + self.b)

    def value(self, item: int) -> float:
        """v of one prompt."""
        return float(self.a[item] / (self.a[item] + self.b[item]))

    def add(self, item: int, reward: float) -> None:
        """Take in the outcome of one answer."""
        self.a[item] = self.rho * self.a[item] + reward
        self.b[item] = self.rho * self.b[item] + 1 - reward


class ValuedPrompts(RLHFDataset):
    """Prompts with their values: each row has `VALUE`, as it is when the row is taken, and `ITEM`.

    A column `PRIOR` has what the values begin with.
    """

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        priors = [np.nan] * len(self)
        if PRIOR in self.dataframe.column_names:
            priors = [np.nan if value is None else float(value) for value in self.dataframe[PRIOR]]
        wrong = [item for item, value in enumerate(priors) if not (np.isnan(value) or 0 <= value <= 1)]
        if wrong:
            where = f"{self.describe(wrong[0])}, column {PRIOR!r}"
            raise DataError("a value is a share of right answers", key=where, got=priors[wrong[0]], allowed="0 to 1")
        self.tracked = PromptValues(priors, float(read(self.config, "spo_rho", 0.9)))

    def __getitem__(self, item: int) -> dict[str, Any]:
        return {**super().__getitem__(item), ITEM: int(item), VALUE: self.tracked.value(int(item))}


class ByUncertainty(AbstractCurriculumSampler):
    """An epoch is one batch: prompts drawn without replacement, the more likely the less certain their outcome is.

    Raises:
        ConfigError: the dataset has no values.
    """

    def __init__(self, data_source: ValuedPrompts, data_config: Any):
        if not hasattr(data_source, "tracked"):
            fix = "Set data.custom_cls to recipe/spo/core.py and ValuedPrompts."
            raise ConfigError("prompts are drawn by their values", key="data.custom_cls.name", fix=fix)
        self.tracked, self.floor = data_source.tracked, float(read(data_config, "spo_floor", 0.05))
        self.size, self.seed, self.epoch = prompts_at_once(data_config), int(read(data_config, "seed", 0)), 0

    def __len__(self) -> int:
        return self.size

    def set_epoch(self, epoch: int) -> None:
        """The draw is a function of seed, epoch and values."""
        self.epoch = epoch

    def weights(self) -> np.ndarray:
        """(N,) how likely a prompt is drawn, up to a factor."""
        values = self.tracked.values()
        return np.sqrt(values * (1 - values)) + self.floor

    def __iter__(self) -> Iterator[int]:
        weights, draw = self.weights(), np.random.default_rng([self.seed, self.epoch])
        return iter(draw.choice(len(weights), self.size, replace=False, p=weights / weights.sum()).tolist())

    def update(self, batch: DataProto) -> None:
        """Take in the scores of a step, row by row; those of rows that could not be scored count nowhere.

        Raises:
            DataError: a score is no outcome from 0 to 1.
        """
        columns = batch.non_tensor_batch
        scores = outcome_scores(batch.tensors["token_level_scores"], batch.tensors["response_mask"]).tolist()
        failed = columns.get("unscorable", [False] * len(scores))
        for item, score, has_none in zip(columns[ITEM], scores, failed, strict=True):
            if has_none:
                continue
            if not -EPSILON <= score <= 1 + EPSILON:
                key, fix = "reward.custom_reward_function", "Scale the scores into this range."
                raise DataError("SPO counts outcomes", key=key, got=score, allowed="from 0 to 1", fix=fix)
            self.tracked.add(int(item), min(max(score, 0.0), 1.0))

    def state_dict(self) -> dict[str, Any]:
        """The values, as JSON."""
        return {"a": self.tracked.a.tolist(), "b": self.tracked.b.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the values of a checkpoint; the loader has checked that the data has as many rows."""
        self.tracked.a[:], self.tracked.b[:] = state["a"], state["b"]


@torch.no_grad()
def single_stream(
    token_level_rewards: Tensor, response_mask: Tensor, non_tensor_batch: Mapping[str, Any], **_: object
) -> tuple[Tensor, Tensor]:
    """``(r - v - mean) / std`` over the batch, of each answer; an answer without a score gets 0.

    Args:
        token_level_rewards, response_mask: (B, T).
        non_tensor_batch: has the column `VALUE`, (B,).

    Returns:
        advantages and returns, which are the same: (B, T).

    Raises:
        ConfigError: rows without a value.
    """
    if VALUE not in non_tensor_batch:
        fix = "Set data.custom_cls to recipe/spo/core.py and ValuedPrompts, as python -m recipe.spo.main_spo does."
        raise ConfigError("the prompts have no values", key="data.custom_cls.name", fix=fix)
    values = torch.tensor([float(value) for value in non_tensor_batch[VALUE]], dtype=torch.float64)
    scores = outcome_scores(token_level_rewards, response_mask)
    gain = scores - values.to(scores.device)
    counted = gain.isfinite()
    centred = torch.where(counted, gain - gain[counted].mean(), 0.0)
    deviation = (centred.square().sum() / counted.sum().clamp(min=2).sub(1)).sqrt()
    advantages = spread_over_tokens(centred / (deviation + EPSILON), response_mask, token_level_rewards.dtype)
    return advantages, advantages
