"""Groups, all samples of one prompt each, between the prompts and the queue: drawn, judged, saved, counted."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from verl.errors import ConfigError, DataError
from verl.journal.schedule import Notes
from verl.metrics import notice
from verl.protocol import DataProto
from verl.protocol.fields import declared_field
from verl.protocol.lazy import trimmed_axis
from verl.trainer.ppo import stages
from verl.trainer.ppo.context import ABOUT_THE_REQUEST, StepContext, together
from verl.trainer.ppo.queue import GroupQueue, QueuedGroup
from verl.trainer.ppo.stages import PromptSource

FINISHED, PROMPTS = "queue", "queue_prompts"
"""Parts of a checkpoint: samples of finished groups; prompts of the others, and of those that are not admitted yet."""
STATE = "queue"
OF_FAILED = {"failed": "failed_loop", "unscorable": "unscorable"}
"""Why a group failed, and what the ledger says of its samples. Sampling is tried once more, scoring is not."""
MANY_LOST = 20
"""Batches of groups of which none is kept: a run without a limit of its own ends there."""
LIMIT = "algorithm.filter_groups.max_num_gen_batches"
CHANGE = "The task is too easy or too hard for this model: change the data, or the filter (algorithm.filter_groups)."


class Drawn:
    """Single prompts out of the batches that the loader makes."""

    def __init__(self) -> None:
        self.left: deque[DataProto] = deque()

    def next(self, source: PromptSource) -> DataProto:
        """The next prompt, a batch of one row."""
        if not self.left:
            batch = source.next_prompts()
            self.left.extend(batch.slice(row, row + 1) for row in range(len(batch)))
        return self.left.popleft()


@dataclass(frozen=True)
class GroupRows:
    """The rows of a group in the batch that it was sampled with: a group is cut out only where it goes on alone.

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

    def __len__(self) -> int:
        return self.stop - self.start

    def alone(self) -> DataProto:
        """A batch of these rows, which shares their memory."""
        return self.batch if len(self) == len(self.batch) else self.batch.slice(self.start, self.stop)


@dataclass(frozen=True)
class Done:
    """What became of a group.

    Args:
        number: of the group in the queue.
        rows: its samples; of a group that failed what was asked for.
        oldest: version of its oldest token, where the sampler names versions.
        why: there is nothing to train on: ``filtered``, ``failed`` or ``unscorable``.
        served: how each of its requests was served, where the sampler says so.
    """

    number: int
    rows: GroupRows
    oldest: int | None = None
    why: str = ""
    served: Mapping[str, Notes] = field(default_factory=dict)


def count_lost(done: Done, ctx: StepContext) -> None:
    """Metrics of a group that failed, or of which no sample could be scored."""
    if done.why == "unscorable":
        ctx.metrics.add("reward/unscorable", len(done.rows), "sum")
        ctx.metrics.add("reward/unscorable_fraction", 1.0, weight=len(done.rows))
    ctx.metrics.add("training/rollout_failure/evicted_samples", len(done.rows), "sum")


def judged(numbers: Sequence[int], samples: DataProto, ctx: StepContext) -> list[Done]:
    """Scored groups of equal size, or why there is nothing to train on.

    Args:
        numbers: of the groups in the queue.
        samples: of the first one, then of the next.
    """
    each = len(samples) // len(numbers)
    dropped = stages.filtered(samples, np.repeat(np.arange(len(numbers)), each), ctx)
    samples = trimmed(samples)
    samples.meta_info = {k: v for k, v in samples.meta_info.items() if k not in ABOUT_THE_REQUEST}
    places = zip(numbers, range(0, len(samples), each), dropped, _oldest(samples, len(numbers)), strict=True)
    return [
        Done(number, GroupRows(samples, start, start + each), oldest, why="filtered" if is_dropped else "")
        for number, start, is_dropped, oldest in places
    ]


def _oldest(samples: DataProto, groups: int) -> list[int | None]:
    """The version of each group's oldest token; None where no token has one (-1: padding, inserted text)."""
    versions = samples.tensors.get("token_versions", None)
    if versions is None:
        return [None] * groups
    highest = torch.iinfo(versions.dtype).max
    oldest = torch.where(versions >= 0, versions, highest).reshape(groups, -1).amin(-1)
    return [None if version == highest else version for version in oldest.tolist()]


def joined(groups: Sequence[GroupRows]) -> DataProto:
    """The samples of groups as one batch, only as wide as the longest prompt and response in it."""
    runs: list[GroupRows] = []
    for rows in groups:
        if runs and runs[-1].batch is rows.batch and runs[-1].stop == rows.start:
            runs[-1] = GroupRows(rows.batch, runs[-1].start, rows.stop)
        else:
            runs.append(rows)
    parts = [rows.alone() for rows in runs]
    return trimmed(parts[0] if len(parts) == 1 else together(parts))


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
        DataError: with the numbers: so many batches as ``algorithm.filter_groups.max_num_gen_batches`` says gave no
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
        notice(LIMIT, f"step {ctx.step}: the queue is nearly starved: {text}. Without a limit it goes on until the "
               f"others are there; with {LIMIT}={MANY_LOST} the run ends here. {CHANGE}")  # fmt: skip
        return
    raise DataError(
        f"the queue starves: {text}",
        key=LIMIT if limit > 0 else "algorithm.filter_groups.enable",
        got=limit if limit > 0 else rule.enable,
        fix=CHANGE,
    )


def carried_groups(queue: GroupQueue, drawn: Drawn, details: Sequence[str]) -> dict[str, DataProto]:
    """The queue as parts of a checkpoint; without any group there is nothing to keep.

    Args:
        details: columns that the scorer returned besides the scores.
    """
    finished = [entry.samples.alone() for entry in queue if entry.is_complete]
    unfinished = [entry.prompt for entry in queue if not entry.is_complete]
    rows = [len(samples) for samples in finished]
    state = {**queue.state_dict(), "rows": rows, "unfinished": len(unfinished), "details": list(details)}
    parts = {}
    for name, groups in ((FINISHED, finished), (PROMPTS, [*unfinished, *drawn.left])):
        if groups:
            parts[name] = together(groups)
            parts[name].meta_info = {**parts[name].meta_info, STATE: state}
    return parts


def groups_carried(parts: Mapping[str, DataProto], queue: GroupQueue, drawn: Drawn) -> tuple[list[int], list[str]]:
    """Fill a queue from what `carried_groups` made; returns the unfinished groups, and ``details``."""
    saved = {name: parts[name].select() for name in (FINISHED, PROMPTS) if name in parts}
    if not saved:
        return [], []
    states = [part.meta_info.pop(STATE) for part in saved.values()]
    state, starts = states[0], [0]
    for count in state["rows"]:
        starts.append(starts[-1] + count)
    finished = trimmed(saved[FINISHED]) if FINISHED in saved else None
    samples = [] if finished is None else [GroupRows(finished, start, stop) for start, stop in pairwise(starts)]
    left = saved.get(PROMPTS)
    rows = [] if left is None else [left.slice(row, row + 1) for row in range(len(left))]
    waiting = iter(rows[: state["unfinished"]])
    prompts = [None if place >= 0 else next(waiting) for _, _, place in state["entries"]]
    drawn.left = deque(rows[state["unfinished"] :])
    return queue.load_state_dict(state, prompts, samples), state["details"]


def samples_of_queue(parts: Mapping[str, DataProto]) -> tuple[DataProto | None, int]:
    """The samples in a checkpoint of `carried_groups`, and how many prompts it has besides, for a run without queue."""
    samples, prompts = parts.get(FINISHED), parts.get(PROMPTS)
    if samples is not None:
        samples = samples.select()
        samples.meta_info = {name: value for name, value in samples.meta_info.items() if name != STATE}
    return samples, 0 if prompts is None else len(prompts)


def check_in_time(queue: GroupQueue) -> None:
    """What a checkpoint had in its queue can be trained on within this run's bound, which may be another one.

    Raises:
        ConfigError: it cannot, so the run would stop or wait for ever.
    """
    bound, step = queue.bound, queue.step
    if bound.overdue != "wait" and not bound.in_order:
        return  # it drops what is too old, or trains on it
    versions = [entry.version if entry.is_complete else step for entry in queue]
    versions = versions if bound.in_order else sorted(versions)
    worst = max((step + place // bound.groups - version for place, version in enumerate(versions)), default=0)
    if worst > bound.allowed:
        raise ConfigError(
            f"the checkpoint has {len(queue)} groups in its queue, of which one would be trained on {worst} versions "
            f"late: this run allows {bound.allowed}",
            key="trainer.resume_changed",
            got="accept",
            fix="Give the queue's settings of before, or go on under trainer.v1.trainer_mode=sync.",
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
        counts, total, each = self.queue.counts, sum(self._ages.values()), ctx.samples_per_prompt
        stale = total - self._ages[0]
        waited = ctx.timers.seconds.get("wait_for_samples", 0.0)
        generated = counts["trained"] + counts["filtered"] + counts["dropped"] + self.queue.complete_groups
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
            "trainer/idle_seconds": waited,
            "rollouter/idle_seconds": idle_seconds - self._idle,
        }
        for name, value in values.items():
            full = name if name.startswith("count/") else f"{self.prefix}/{name}"
            ctx.metrics.add(full, float(value), "last")
