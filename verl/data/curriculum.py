"""A curriculum: the prompts that the policy sometimes solves come more often than those it always or never does.

``data.sampler.class_path=pkg://verl.data.curriculum data.sampler.class_name=MixedRewardsFirst``
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, TypedDict

import numpy as np

from verl.algorithms.groups import SAME
from verl.data.loader import SeededSampler
from verl.data.mixture import Mixture
from verl.data.settings import read
from verl.errors import ConfigError, DataError

if TYPE_CHECKING:
    from verl.config.schema.node import SettingsSource
    from verl.protocol import DataProto

FLAT_ROWS = "flat_rows"
"""Key of ``meta_info``: ``__row__`` of the prompts that dynamic sampling dropped since the batch before."""


class CurriculumState(TypedDict):
    """The place in the order and what was learned, as JSON values."""

    epoch: int
    drawn: int
    passes: list[list[int]]
    rows: list[int]
    mixed: list[float]


class MixedRewardsFirst(SeededSampler):
    """Passes over the rows in permutations, and takes each row with the chance that its samples get mixed rewards.

    A group is mixed if the rewards of its samples differ: a group estimator learns only from those. The share of mixed
    groups of a prompt is m = 1 before it was sampled; each group moves it by `memory` towards 1 (mixed) or 0, and the
    prompt is taken with probability `least` + (1 - `least`) m. What is too easy or too hard now comes back later.
    With ``data.source_weights`` that is the order inside each source, and the sources have their shares.

    An epoch has as many prompts as a plain one, and begins a new pass. The order is a function of the seed, the epoch
    and the steps before; the state has no random numbers.

    Args:
        data_source: the training data.
        data_config: the ``data`` section, with its ``seed``.
    """

    least = 0.1
    memory = 0.5

    def __init__(self, data_source: object, data_config: SettingsSource):
        self.mixture = Mixture.of(data_source, data_config)
        self.seed = int(read(data_config, "seed", 0))
        self.epoch, self.drawn = 0, 0
        self._passes = self._first_passes()
        self._mixed: dict[int, float] = {}
        """``__row__`` -> share of mixed groups, of prompts that were sampled."""
        self._order: dict[int, tuple[tuple[int, int], np.ndarray, np.ndarray]] = {}

    def __len__(self) -> int:
        return len(self.mixture.turns)

    def facts(self) -> dict[str, object]:
        return {"seed": self.seed, "sources": self.mixture.facts()}

    def check_samples(self, number: int) -> None:
        """Raises `ConfigError` where every prompt has one sample (``actor_rollout_ref.rollout.n``)."""
        if number < 2:
            fault = "the curriculum compares the samples of a prompt, and there is one of each"
            raise ConfigError(fault, key="actor_rollout_ref.rollout.n", got=number, allowed="2 or more")

    def set_epoch(self, epoch: int) -> None:
        """The epoch that the next rows are of."""
        if epoch != self.epoch:
            self.epoch, self.drawn, self._passes = epoch, 0, self._first_passes()

    def __iter__(self) -> Iterator[int]:
        while self.drawn < len(self):
            source = int(self.mixture.turns[self.drawn])
            self.drawn += 1
            yield self._next(source)

    def chance(self, row: int) -> float:
        """The probability with which a pass takes a prompt.

        Args:
            row: its ``__row__``.
        """
        return self.least + (1 - self.least) * self._mixed.get(row, 1.0)

    def update(self, batch: DataProto) -> None:
        """Learn from the rewards of a step.

        Args:
            batch: ``token_level_scores`` (B, T); ``uid``, ``__row__`` and ``unscorable`` (B,).

        Raises:
            DataError: the dataset does not number its rows.
        """
        columns = batch.non_tensor_batch
        if "__row__" not in columns:
            fault = "the curriculum learns by rows, and the dataset does not number them ('__row__')"
            raise DataError(fault, key="data.custom_cls", fix="Derive the class from verl.data.RLHFDataset.")
        for row in batch.meta_info.get(FLAT_ROWS, ()):
            self._learn(int(row), 0.0)
        scores = batch.tensors["token_level_scores"].double().sum(-1).tolist()
        left_out = columns.get("unscorable", np.zeros(len(batch), dtype=bool))
        rewards: dict[tuple[str, int], list[float]] = {}
        for uid, row, score, out in zip(columns["uid"], columns["__row__"], scores, left_out, strict=True):
            of_group = rewards.setdefault((str(uid), int(row)), [])
            if not out:
                of_group.append(score)
        for (_, row), of_group in rewards.items():
            if len(of_group) > 1:
                self._learn(row, float(max(of_group) - min(of_group) > SAME))

    def metrics(self) -> dict[str, float]:
        """The share of the rows that were sampled, and their mean share of mixed groups."""
        seen = len(self._mixed)
        rows = sum(map(len, self.mixture.rows))
        mixed = {"data/curriculum/mixed": sum(self._mixed.values()) / seen} if seen else {}
        return {"data/curriculum/seen": seen / rows, **mixed}

    def state_dict(self) -> CurriculumState:
        """A copy, which later steps leave as it is."""
        return {
            "epoch": self.epoch,
            "drawn": self.drawn,
            "passes": [list(place) for place in self._passes],
            "rows": list(self._mixed),
            "mixed": list(self._mixed.values()),
        }

    def load_state_dict(self, state: CurriculumState) -> None:
        """Continue with what `state_dict` returned."""
        self.epoch, self.drawn = state["epoch"], state["drawn"]
        self._passes = [(number, place) for number, place in state["passes"]]
        self._mixed = dict(zip(state["rows"], state["mixed"], strict=True))

    def _first_passes(self) -> list[tuple[int, int]]:
        """(number, place in it) of each source's pass."""
        return [(0, 0)] * len(self.mixture.items)

    def _next(self, source: int) -> int:
        items, rows = self.mixture.items[source], self.mixture.rows[source]
        while True:  # ends, since every chance is at least `least`
            number, place = self._passes[source]
            order, draws = self._pass(source, number)
            last = place + 1 == len(items)
            self._passes[source] = (number + 1, 0) if last else (number, place + 1)
            if draws[place] < self.chance(int(rows[order[place]])):
                return int(items[order[place]])

    def _pass(self, source: int, number: int) -> tuple[np.ndarray, np.ndarray]:
        """A permutation of a source's rows, and a uniform number for each place."""
        key = (self.epoch, number)
        if source not in self._order or self._order[source][0] != key:
            generator, rows = np.random.default_rng([self.seed, source, *key]), len(self.mixture.items[source])
            self._order[source] = (key, generator.permutation(rows), generator.random(rows))
        return self._order[source][1:]

    def _learn(self, row: int, mixed: float) -> None:
        before = self._mixed.get(row, 1.0)
        self._mixed[row] = before + self.memory * (mixed - before)
