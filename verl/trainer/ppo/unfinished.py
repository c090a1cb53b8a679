"""Responses that go on in the next step (``rollout.keep_unfinished``): synchronous partial rollouts.

More prompts are sampled than a step trains on. Once enough of them have all their samples, sampling stops; the others
keep what they have (`verl.agent_loop.unfinished`) and go first the next time, with the weights of then. So a long
response delays no step, and nothing that was sampled is thrown away (APRIL, arXiv 2509.18521). A prompt in work is n
adjacent rows with the columns of the data, ``uid``, ``sample_index`` and ``earlier``; no tensor of samples is kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Protocol

import numpy as np

from verl.agent_loop.unfinished import EARLIER, LEFT
from verl.config import PPOTrainerConfig
from verl.protocol import DataProto

ROWS, PROMPTS = "unfinished", "loaded_prompts"
"""Names of the two batches in a checkpoint."""


class GivesPrompts(Protocol):
    """The source of prompts."""

    def next_prompts(self) -> DataProto: ...


class UnfinishedPrompts:
    """The prompts in work between two rounds of sampling, oldest first.

    Args:
        at_once: prompts that are sampled together.
    """

    def __init__(self, at_once: int, samples_per_prompt: int):
        self.at_once, self.samples_per_prompt = at_once, samples_per_prompt
        self._rows: DataProto | None = None
        self._loaded: DataProto | None = None

    @classmethod
    def of(cls, config: PPOTrainerConfig) -> UnfinishedPrompts | None:
        """As the configuration says; None where every response ends in its step."""
        rollout = config.actor_rollout_ref.rollout
        if not rollout.keep_unfinished:
            return None
        return cls(prompts_in_work(config.data.train_batch_size, rollout.over_sample_rate), rollout.n)

    def __len__(self) -> int:
        """Prompts in work."""
        return 0 if self._rows is None else len(self._rows) // self.samples_per_prompt

    def new_prompts(self, source: GivesPrompts) -> DataProto:
        """As many prompts as may begin now; what else the source gave waits here."""
        wanted = max(1, self.at_once - len(self))
        parts = [] if self._loaded is None else [self._loaded]
        while sum(map(len, parts)) < wanted:
            parts.append(source.next_prompts())
        loaded = DataProto.concat(parts) if len(parts) > 1 else parts[0]
        new, rest = loaded.slice(0, wanted), loaded.slice(wanted, None)
        self._loaded = rest if len(rest) else None
        return new

    def with_earlier(self, rows: DataProto) -> DataProto:
        """All rows to sample: those in work, then these.

        Args:
            rows: of new prompts, with ``sample_index``.
        """
        rows.non_tensor_batch[EARLIER] = np.full(len(rows), None, dtype=object)
        if self._rows is None:
            return rows
        earlier = DataProto(self._rows.batch, self._rows.non_tensor_batch, rows.meta_info)
        return DataProto.concat([earlier, rows])

    def keep(self, asked: DataProto, samples: DataProto) -> DataProto:
        """Keep the rows whose prompt is not complete; returns the others.

        Args:
            asked: what `with_earlier` gave.
            samples: the result, row for row.
        """
        states = samples.non_tensor_batch.pop(LEFT)
        samples.non_tensor_batch.pop(EARLIER)
        is_left = np.array([state is not None for state in states], dtype=bool)
        kept = DataProto(asked.batch, {**asked.non_tensor_batch, EARLIER: states}).select_idxs(np.flatnonzero(is_left))
        self._rows = kept if len(kept) else None
        return samples.select_idxs(np.flatnonzero(~is_left))

    def peek(self) -> DataProto | None:
        """The rows in work."""
        return self._rows

    def state(self) -> dict[str, DataProto]:
        """What a checkpoint has of it; later rounds leave it as it is."""
        parts = {ROWS: self._rows, PROMPTS: self._loaded}
        return {name: part for name, part in parts.items() if part is not None}

    def load_state(self, state: Mapping[str, DataProto]) -> None:
        """The reverse of `state`."""
        self._rows, self._loaded = state.get(ROWS), state.get(PROMPTS)


def prompts_in_work(trained: int, rate: float) -> int:
    """Prompts that are sampled at once, so that a share of ``rate`` may be left when ``trained`` of them are done."""
    return math.ceil(trained / (1 - Fraction(str(rate))))
