"""Groups, all samples of one prompt each, on their way through the stream: drawn, judged, joined, counted."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from verl.agent_loop.unfinished import ENOUGH
from verl.data.loader import PromptSource
from verl.errors import DataError
from verl.journal.schedule import Notes
from verl.metrics import notice
from verl.protocol import DataProto
from verl.protocol.fields import declared_field
from verl.protocol.lazy import trimmed_axis
from verl.trainer.ppo import accounting, group_filter, stages
from verl.trainer.ppo.admission import GroupQueue, QueuedGroup
from verl.trainer.ppo.context import StepContext
from verl.trainer.ppo.trajectories import version_bounds

OF_FAILED = {"failed": "failed_loop", "unscorable": "unscorable"}
"""Why a group failed, and what the ledger says of its samples. Sampling is tried once more, scoring is not."""
UNFINISHED = "unfinished"
"""A group that stays in work, with what its samples have so far."""
MANY_LOST = 20
"""Batches of groups of which none is kept: a run without a limit of its own ends there."""
LIMIT = "algorithm.filter_groups.max_num_gen_batches"
GEN_BATCHES = "training/num_gen_batches"
CHANGE = "The task is too easy or too hard for this model: change the data, or the filter (algorithm.filter_groups)."
ABOUT_THE_REQUEST = ("global_steps", "validate", "do_sample", ENOUGH)
"""Keys of ``meta_info`` that are about one call of the sampler."""


@dataclass(frozen=True)
class GroupRows:
    """The rows of a group in the batch that they came with: a group is cut out only where it is needed alone.

    Args:
        batch: which nobody changes.
        start, stop: rows of it.
    """

    batch: DataProto
    start: int
    stop: int

    @classmethod
    def of(cls, batch: DataProto) -> GroupRows:
        """All rows of a batch."""
        return cls(batch, 0, len(batch))

    @classmethod
    def each(cls, batch: DataProto, size: int = 1) -> list[GroupRows]:
        """The groups of a batch that has nothing else, of ``size`` rows each."""
        return [cls(batch, start, start + size) for start in range(0, len(batch), size)]

    def __len__(self) -> int:
        return self.stop - self.start

    def alone(self) -> DataProto:
        """A batch of these rows, which shares their memory."""
        return self.batch if len(self) == len(self.batch) else self.batch.slice(self.start, self.stop)


class DrawnPrompts:
    """Prompts out of the batches that the loader makes, each a `GroupRows` of one row."""

    def __init__(self) -> None:
        self.left: deque[GroupRows] = deque()

    def take(self, source: PromptSource, count: int) -> list[GroupRows]:
        """The next prompts."""
        while len(self.left) < count:
            self.left.extend(GroupRows.each(source.next_prompts()))
        return [self.left.popleft() for _ in range(count)]

    def batch(self, source: PromptSource) -> list[GroupRows]:
        """The loader's next batch, or what is left of one."""
        return self.take(source, len(self.left)) or GroupRows.each(source.next_prompts())


@dataclass(frozen=True)
class Done:
    """What became of a group.

    Args:
        number: of the group in the queue.
        rows: its samples; of a group that failed the rows without samples; of an unfinished one its prompt.
        oldest: version of its oldest token, where the sampler names versions.
        why: there is nothing to train on: ``filtered``, ``failed`` or ``unscorable``; or `UNFINISHED`.
        compared: two or more of its samples count, so a filtered group says something of its prompt.
        served: how each of its requests was served, where the sampler says so.
    """

    number: int
    rows: GroupRows
    oldest: int | None = None
    why: str = ""
    compared: bool = False
    served: Mapping[str, Notes] = field(default_factory=dict)


def gen_batches(ctx: StepContext) -> int:
    """Batches of prompts that were sampled for a step until now."""
    return int(ctx.metrics.values().get(GEN_BATCHES, 0))


def count_lost(done: Done, ctx: StepContext) -> None:
    """Metrics of a group that failed, or of which no sample could be scored."""
    if done.why == "unscorable":
        ctx.metrics.add("reward/unscorable", len(done.rows), "sum")
        ctx.metrics.add("reward/unscorable_fraction", 1.0, weight=len(done.rows))
    ctx.metrics.add("training/rollout_failure/evicted_samples", len(done.rows), "sum")


def without_samples(number: int, prompt: GroupRows, why: str, ctx: StepContext) -> Done:
    """A group without samples, which the metrics count."""
    done = Done(number, GroupRows.of(stages.repeated(prompt.alone(), ctx)), why=why)
    count_lost(done, ctx)
    return done


def judged(numbers: Sequence[int], samples: DataProto, ctx: StepContext, trims: bool = True) -> list[Done]:
    """Scored groups of equal size, or why there is nothing to train on.

    Args:
        numbers: of the groups in the queue.
        samples: of the first one, then of the next.
        trims: cut the columns to the longest prompt and response.
    """
    each, rows = ctx.run.samples_per_prompt, group_filter.group_numbers(samples)
    if len(samples) != len(numbers) * each:
        raise DataError(
            f"{len(numbers)} prompts x {each} samples were to be sampled, and {len(samples)} came back",
            key="skip.rollout" if ctx.config.skip.rollout.enable else "actor_rollout_ref.rollout.name",
            fix="Samples from files are those of a run with the same batches of prompts (data.gen_batch_size, "
            "algorithm.filter_groups.max_inflight_gen_batches).",
        )
    is_flat, is_compared = (of_groups[rows] for of_groups in stages.flat_groups(samples, rows, ctx))
    accounting.drop_rows(samples, is_flat, "filtered_group", ctx)
    oldest = oldest_versions(samples, len(numbers))
    if trims:
        samples, stays = trimmed(samples), np.ones(len(samples), dtype=bool)  # a replay reads groups that are dropped
    else:
        stays = ~is_flat
        samples = samples.select() if stays.all() else samples.select_idxs(stays)
    samples.meta_info = {k: v for k, v in samples.meta_info.items() if k not in ABOUT_THE_REQUEST}
    groups, none = iter(GroupRows.each(samples, each)), GroupRows(samples, 0, 0)
    return [
        Done(number, next(groups) if stays[row] else none, age, "filtered" if is_flat[row] else "", is_compared[row])
        for number, row, age in zip(numbers, range(0, len(stays), each), oldest, strict=True)
    ]


def oldest_versions(samples: DataProto, groups: int) -> list[int | None]:
    """The version of each group's oldest token; None where no token has one (-1: padding, inserted text)."""
    versions = samples.tensors.get("token_versions", None)
    if versions is None:
        return [None] * groups
    none, oldest = torch.iinfo(versions.dtype).max, version_bounds(samples)[0].reshape(groups, -1).amin(-1)
    return [None if version == none else version for version in oldest.tolist()]


def joined(groups: Sequence[GroupRows]) -> DataProto:
    """The rows of groups as one batch, whose columns and facts may be changed."""
    parts: list[tuple[DataProto, list[GroupRows]]] = []
    for rows in groups:
        if not parts or parts[-1][0] is not rows.batch:
            parts.append((rows.batch, []))
        parts[-1][1].append(rows)
    cut = [_rows_of(batch, there) for batch, there in parts]
    joined = cut[0].select() if len(cut) == 1 else together(cut)
    joined.meta_info = dict(joined.meta_info)
    return joined


def _rows_of(batch: DataProto, groups: Sequence[GroupRows]) -> DataProto:
    """Groups of one batch: a view where they are adjacent, else a copy."""
    first, last = groups[0], groups[-1]
    if all(before.stop == after.start for before, after in pairwise(groups)):
        return GroupRows(batch, first.start, last.stop).alone()
    return batch.select_idxs(np.concatenate([np.arange(rows.start, rows.stop) for rows in groups]))


def together(parts: Sequence[DataProto]) -> DataProto:
    """Samples of several calls of the sampler as one batch, which has the columns of every part.

    A part lacks a column where nothing happened that it tells of (``agent_error``, why a conversation ``ended``, a
    detail of the score): None stands there. A tensor is kept where all parts have it.
    """
    names = dict.fromkeys(name for part in parts for name in part.non_tensor_batch)
    details = dict.fromkeys(name for part in parts for name in part.meta_info.get(group_filter.DETAILS, ()))
    tensors = [set[str]() if part.batch is None else set(part.batch.keys()) for part in parts]
    shared, alike = set.intersection(*tensors), []
    for part, there in zip(parts, tensors):
        lacks = {name: np.full(len(part), None, dtype=object) for name in names if name not in part.non_tensor_batch}
        part = part.select(batch_keys=None if there == shared else sorted(shared))
        part.non_tensor_batch = {**part.non_tensor_batch, **lacks}
        part.meta_info = {**part.meta_info, **({group_filter.DETAILS: list(details)} if details else {})}
        alike.append(part)
    return DataProto.concat(alike)


def trimmed(samples: DataProto) -> DataProto:
    """A copy, only as wide as the longest prompt and response in it: no number depends on what it was sampled with.

    Args:
        samples: ``prompts`` (B, P) padded left, ``responses`` (B, T) padded right, ``attention_mask`` (B, P+T).
    """
    tensors: dict[str, Any] = dict(samples.tensors.items())
    width, mask = tensors["prompts"].shape[-1], tensors["attention_mask"].bool()
    prompt = max(1, int(mask[:, :width].sum(-1).max()))
    response = max(1, int(mask[:, width:].sum(-1).max()))
    parts = {"P": (width - prompt, prompt), "T": (0, response), "P+T": (width - prompt, prompt + response)}
    for name, column in tensors.items():
        field = declared_field(name)
        if field is not None and field.time_axis is not None:
            tensors[name] = trimmed_axis(column, field.time_axis, *parts[str(field.time_symbol)])
    batch = TensorDict(tensors, batch_size=samples.tensors.batch_size, device=samples.tensors.device)
    return DataProto(batch, dict(samples.non_tensor_batch), dict(samples.meta_info))


def check_not_starved(queue: GroupQueue, lost_before: int, ctx: StepContext) -> None:
    """Stop where groups are sampled on and on, and none is kept; say so where few are.

    Args:
        lost_before: groups that were lost when the last chunk was taken.

    Raises:
        DataError: with the counts: ``algorithm.filter_groups.max_num_gen_batches`` batches gave no
            chunk or, without such a limit, `MANY_LOST` batches gave no group.
    """
    rule, lost, waiting = ctx.config.algorithm.filter_groups, queue.lost - lost_before, queue.complete_groups
    limit = rule.max_num_gen_batches
    if lost < (limit if limit > 0 else MANY_LOST) * queue.bound.groups:
        return
    because = f"{queue.counts['filtered']} in the run because all samples of a prompt came out the same"
    if rule.enable:
        because += f" in {rule.metric or 'the reward'}"
    text = (
        f"since the last update {lost} groups of samples were left out ({because}, {queue.counts['failed']} because "
        f"sampling or scoring failed), and {waiting} of the {queue.bound.chunk} that are trained on at once are there"
    )
    if limit <= 0 and waiting:
        notice(LIMIT, f"step {ctx.step}: the queue is nearly starved: {text}. Without a limit it samples until the "
               f"others are there; with {LIMIT}={MANY_LOST} the run ends here. {CHANGE}")  # fmt: skip
        return
    raise DataError(
        f"the queue starves: {text}",
        key=LIMIT if limit > 0 else "algorithm.filter_groups.enable",
        got=limit if limit > 0 else rule.enable,
        fix=CHANGE,
    )


class Report:
    """What a step did with the queue, as metrics.

    Args:
        prefix: of those that are the schedule's own.
    """

    def __init__(self, queue: GroupQueue, prefix: str, idle_seconds: float):
        self.queue, self.prefix, self._idle = queue, prefix, idle_seconds
        self._ages: Counter[int] = Counter()

    def trained(self, entries: Sequence[QueuedGroup], step: int) -> None:
        """Groups that a step trains on; ``step`` is the version that it begins with."""
        self._ages.update(step - entry.version for entry in entries)

    def add_to(self, ctx: StepContext, idle_seconds: float) -> None:
        """Counts are of the run so far, ages of this step."""
        counts, total, each = self.queue.counts, sum(self._ages.values()), ctx.run.samples_per_prompt
        stale = total - self._ages[0]
        ended = ("trained", "passed_over", "filtered", "dropped")
        generated = sum(counts[name] for name in ended) + self.queue.complete_groups
        oldest = max(self.queue.bound.allowed, *self._ages)
        values = {
            "count/total_generated_samples": generated * each,
            "count/staleness_samples": stale * each,
            "count/dropped_stale_samples": counts["dropped"] * each,
            "staleness/mean": sum(age * number for age, number in self._ages.items()) / total,
            "staleness/max": max(self._ages),
            **{f"staleness/share_{age}": self._ages[age] / total for age in range(oldest + 1)},
            "queue/complete_groups": self.queue.complete_groups,
            "queue/groups": len(self.queue),
            "rollouter/idle_seconds": idle_seconds - self._idle,
        }
        for name, value in values.items():
            full = name if name.startswith("count/") else f"{self.prefix}/{name}"
            ctx.metrics.add(full, float(value), "last")
