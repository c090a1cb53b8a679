"""Batches in an order that is a function of (seed, epoch) alone, resumable at any batch.

The state is a few JSON numbers: which epoch, and how many of its rows were handed out. It depends neither on worker
processes nor on what they fetched ahead, so a run may be resumed with other workers or another batch size; this is why
torchdata's loader, whose state is that of its workers, is not used.
"""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sized
from itertools import islice
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler

from verl import env
from verl.data.collate import collate_fn as collate_rows
from verl.errors import CheckpointError, ConfigError, DataError
from verl.metrics import notice
from verl.protocol import DataProto

ORDER = "data.train_files, data.source_weights, data.sampler, data.shuffle, data.seed"
RESUME = "Use the same files and settings to resume, or start over with trainer.resume_mode=disable."


@runtime_checkable
class HasState(Protocol):
    """A user's sampler that keeps its own place, such as a curriculum."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@runtime_checkable
class HasEpoch(Protocol):
    def set_epoch(self, epoch: int) -> None: ...


@runtime_checkable
class LearnsFromSteps(Protocol):
    """A curriculum: `update` gets the batch of every step, and may change the order of the prompts that are left."""

    def update(self, batch: Any) -> None: ...


class SeededSampler(Sampler[int], ABC):
    """A sampler of this library, whose order follows from facts."""

    @abstractmethod
    def facts(self) -> dict[str, object]:
        """What must be equal for a place in this order to mean the same rows, as JSON values."""

    def check_samples(self, number: int) -> None:
        """Raises `ConfigError` where a prompt has too few samples for it (``actor_rollout_ref.rollout.n``)."""


class EpochSampler(SeededSampler):
    """All rows once per epoch: in order, or in a permutation that depends on (seed, epoch) and nothing else."""

    def __init__(self, num_rows: int, *, shuffle: bool = True, seed: int | None = None):
        self.num_rows, self.shuffle, self.seed, self.epoch = num_rows, shuffle, int(seed or 0), 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def facts(self) -> dict[str, object]:
        return {"shuffle": self.shuffle, "seed": self.seed}

    def __len__(self) -> int:
        return self.num_rows

    def __iter__(self) -> Iterator[int]:
        if not self.shuffle:
            return iter(range(self.num_rows))
        return iter(np.random.default_rng([self.seed, self.epoch]).permutation(self.num_rows).tolist())


class StatefulLoader:
    """Iterating yields the rest of the current epoch; at its end the next epoch begins.

    Example:
        >>> loader = StatefulLoader(dataset, 64, seed=1)
        >>> while loader.epoch < 3:
        ...     for batch in loader: ...
        >>> other = StatefulLoader(dataset, 64, seed=1); other.load_state_dict(loader.state_dict())  # resumes there

    ``epoch`` and the state count a batch as handed out when the loop body gets it: a checkpoint written in the body of
    the last batch resumes at the first batch of the next epoch. An epoch that was left early starts over at the next
    ``iter``, unless a state was loaded since.

    Args:
        dataset: a map-style dataset.
        batch_size: rows per batch.
        shuffle, seed: the order, unless ``sampler`` gives it.
        num_workers: loader processes, at most one per core; 0 fetches in this process.
        drop_last: leave out the last batch of an epoch if it is smaller.
        sampler: yields the row numbers of one epoch per ``iter``; `set_epoch` is called if it has it. If it has
            `state_dict`, that state is saved and trusted to hold its place; with that or with `update` it needs
            ``num_workers=0``.
        key: the setting behind ``batch_size``, for messages.

    Raises:
        DataError: an empty dataset, or fewer rows than one batch with ``drop_last``.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int | None = None,
        num_workers: int = 0,
        drop_last: bool = True,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        sampler: Sampler[int] | None = None,
        key: str = "data.train_batch_size",
    ):
        rows = len(dataset)  # type: ignore[arg-type]  # a map-style dataset has a length
        if batch_size < 1:
            raise ConfigError("a batch needs at least one row", key=key, got=batch_size)
        if rows == 0:
            raise DataError("the dataset has no rows", key=key)
        self.sampler = sampler or EpochSampler(rows, shuffle=shuffle, seed=seed)
        drawn = len(self.sampler) if isinstance(self.sampler, Sized) else batch_size  # a sampler may have no length
        if drop_last and min(rows, drawn) < batch_size:
            of = f"the dataset has {rows} rows" if rows < batch_size else f"the sampler draws {drawn} rows per epoch"
            fix = f"Set {key}={min(rows, drawn)} or less."
            raise DataError(f"{of}, fewer than one batch of {batch_size}", key=key, fix=fix)
        if drop_last and drawn % batch_size:
            rest = f"{drawn % batch_size} of {drawn} rows, which fill no batch of {batch_size}"
            notice(key, f"an epoch leaves out {rest}")
        if num_workers and isinstance(self.sampler, HasState | LearnsFromSteps):
            raise ConfigError(
                "a sampler that keeps a state or learns from steps must not be read ahead",
                key="data.dataloader_num_workers",
                got=num_workers,
                allowed="0",
            )
        self.dataset, self.batch_size, self.drop_last, self.num_rows = dataset, batch_size, drop_last, rows
        self.num_workers = min(num_workers, os.cpu_count() or 1)
        self._collate = collate_fn or collate_rows
        self._epoch, self._rows_given, self._resume = 0, 0, False

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to, from 0."""
        return self._epoch + self._is_done(self._rows_given)

    @property
    def rows_drawn(self) -> int:
        """Rows of this epoch that were handed out, those of the last batch included."""
        return self._rows_given

    @property
    def repeats(self) -> bool:
        """Whether an epoch may have a row more than once."""
        return type(self.sampler) is not EpochSampler

    def __len__(self) -> int:
        """Batches of one whole epoch."""
        rows = len(self.sampler)  # type: ignore[arg-type]
        return rows // self.batch_size if self.drop_last else -(-rows // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        if self._is_done(self._rows_given):
            self._epoch, self._rows_given = self._epoch + 1, 0
        elif not self._resume:
            self._rows_given = 0
        self._resume = False
        for number, batch in self._batches():
            self._rows_given += number
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """The place in the data, as JSON values (plus the state of a sampler that has one)."""
        done = self._is_done(self._rows_given)
        state: dict[str, Any] = {"epoch": self.epoch, "rows_given": 0 if done else self._rows_given, **self._order()}
        if isinstance(self.sampler, HasState):
            state["sampler"] = self.sampler.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the place that a state names; a state of other data or of another order is a `CheckpointError`."""
        here, keeps = self._order(), isinstance(self.sampler, HasState)
        for name in sorted({*here, *state} - {"epoch", "rows_given", "sampler"}):
            if (name in state, state.get(name)) != (name in here, here.get(name)):
                then, now = (f"{name}={of[name]}" if name in of else f"no {name}" for of in (state, here))
                raise CheckpointError(f"the checkpoint's data had {then}, this run has {now}", key=ORDER, fix=RESUME)
        if ("sampler" in state) != keeps:
            then, now = ("a" if has else "no" for has in (not keeps, keeps))
            fault = f"the checkpoint has {then} state of a sampler, and the sampler of this run keeps {now} state"
            raise CheckpointError(fault, key="data.sampler", got=type(self.sampler).__name__, fix=RESUME)
        self._epoch, self._rows_given, self._resume = int(state["epoch"]), int(state["rows_given"]), True
        if isinstance(self.sampler, HasState):
            self.sampler.load_state_dict(state["sampler"])

    def _order(self) -> dict[str, Any]:
        """What must be equal for a place to mean the same rows."""
        if isinstance(self.sampler, SeededSampler):
            return {"num_rows": self.num_rows, **self.sampler.facts()}
        return {"num_rows": self.num_rows}

    def _is_done(self, rows_given: int) -> bool:
        left = len(self.sampler) - rows_given  # type: ignore[arg-type]
        return left < self.batch_size if self.drop_last else left <= 0

    def _batches(self) -> Iterator[tuple[int, Any]]:
        """The batches that are left of this epoch, each with its number of rows."""
        if isinstance(self.sampler, HasEpoch):
            self.sampler.set_epoch(self._epoch)
        skip = 0 if isinstance(self.sampler, HasState) else self._rows_given
        rows: Any = islice(self.sampler, skip, None)
        if self.num_workers:
            env.set_default("TOKENIZERS_PARALLELISM", "false")  # forked tokenizers must not start threads
        loader = DataLoader(
            self.dataset,
            batch_sampler=BatchSampler(rows, self.batch_size, self.drop_last),
            num_workers=self.num_workers,
            collate_fn=_CountRows(self._collate),
            # Seeds the workers. A generator of its own: the global one belongs to the training loop.
            generator=torch.Generator().manual_seed(self._epoch),
        )
        yield from loader


class _CountRows:
    """Collates a batch and keeps its number of rows; a class, so that it can travel to spawned workers."""

    def __init__(self, collate: Callable[[list[Any]], Any]):
        self.collate = collate

    def __call__(self, rows: list[Any]) -> tuple[int, Any]:
        return len(rows), self.collate(rows)


def prompt_uid(epoch: int, row: Any) -> str:
    """The identity of a prompt in a run: the key of its random numbers and its group."""
    return hashlib.blake2b(f"{epoch}:{row}".encode(), digest_size=8).hexdigest()


class PromptSource:
    """An endless stream of prompt batches: epoch after epoch of a stateful loader, each row with its uid."""

    def __init__(self, loader: Any):
        self.loader = loader
        self._batches: Iterator[dict[str, Any]] = iter(())

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, from 0."""
        return self.loader.epoch

    def next_prompts(self) -> DataProto:
        """The next batch; begins the next epoch where one ends.

        Raises:
            DataError: the sampler draws no rows.
        """
        for _ in range(3):  # a user's sampler that resumes where an epoch ends draws the rest of that first: nothing
            epoch, rows = self.loader.epoch, next(self._batches, None)
            if rows is not None:
                prompts = DataProto.from_single_dict(rows)
                give_uids(prompts, epoch, self.loader.rows_drawn - len(prompts) if self.loader.repeats else None)
                return prompts
            self._batches = iter(self.loader)
        name = type(self.loader.sampler).__name__
        raise DataError(f"{name} draws no rows for epoch {self.loader.epoch}", key="data.sampler.class_name")

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state)
        self._batches = iter(())


def give_uids(prompts: DataProto, epoch: int, first: int | None = None) -> None:
    """Write ``uid`` of every row; the rows of a custom dataset without ``__row__`` are identified by their content.

    Args:
        first: place of the first prompt in its epoch, where an epoch may have a row more than once: each time its
            samples are another group, and draw other numbers.
    """
    rows = prompts.non_tensor_batch.get("__row__", prompts.non_tensor_batch.get("raw_prompt_ids"))
    if rows is None:
        rows = prompts.non_tensor_batch["raw_prompt"]
    names = rows if first is None else [f"{row} at {place}" for place, row in enumerate(rows, first)]
    prompts.non_tensor_batch["uid"] = np.array([prompt_uid(epoch, name) for name in names], dtype=object)
