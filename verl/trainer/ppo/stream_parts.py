"""What a checkpoint keeps of the stream: samples of complete groups, prompts of the others, and those not admitted."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from verl.agent_loop.unfinished import EARLIER
from verl.errors import ConfigError
from verl.protocol import DataProto
from verl.protocol.columns import object_array
from verl.trainer.ppo.admission import GroupQueue
from verl.trainer.ppo.group_filter import DETAILS
from verl.trainer.ppo.groups import DrawnPrompts, GroupRows, joined, oldest_versions, together, trimmed

FINISHED, PROMPTS = "queue", "queue_prompts"
"""The two parts."""
FLAT = "queue_flat"
"""A third one: rows of prompts whose groups were filtered, for a curriculum (`GroupStream`)."""
STATE = "queue"
"""Key of their ``meta_info``: everything else of the queue."""
BY_BATCH = "by_batch"


def parts_of(queue: GroupQueue, drawn: DrawnPrompts, **facts: Any) -> dict[str, DataProto]:
    """The queue as parts of a checkpoint; without any group or prompt there is nothing to keep.

    Args:
        facts: of the stream, as JSON values.
    """
    finished = [entry.samples for entry in queue if entry.is_complete]
    prompts = [entry.prompt for entry in queue if not entry.is_complete]
    rows = [len(samples) for samples in finished]
    state = {**queue.state_dict(), **facts, BY_BATCH: queue.bound.by_batch, "rows": rows}
    parts = {}
    for name, groups in ((FINISHED, finished), (PROMPTS, [*prompts, *drawn.left])):
        if groups:
            parts[name] = joined(groups)
            parts[name].meta_info[STATE] = state
    return parts


def load_parts(parts: Mapping[str, DataProto], queue: GroupQueue, drawn: DrawnPrompts) -> Mapping[str, Any]:
    """Fill a queue from what `parts_of` made; returns its state, with the facts, or nothing."""
    state = next((parts[name].meta_info[STATE] for name in (FINISHED, PROMPTS) if name in parts), None)
    if state is None:
        return {}
    samples, prompts = list[GroupRows](), deque[GroupRows]()
    if FINISHED in parts:
        batch = _without_state(parts[FINISHED])
        if "details" in state:  # of an earlier release
            columns = [name for name in state["details"] if name in batch.non_tensor_batch]
            batch.meta_info.setdefault(DETAILS, columns)
        batch = batch if queue.bound.by_batch else trimmed(batch)
        samples = [GroupRows(batch, *rows) for rows in pairwise(accumulate(state["rows"], initial=0))]
    if PROMPTS in parts:
        prompts.extend(GroupRows.each(_without_state(parts[PROMPTS])))
    of_entries = [None if place >= 0 else prompts.popleft() for _, _, place in state["entries"]]
    queue.load_state_dict(state, of_entries, samples)
    drawn.left = prompts
    return state


def _without_state(part: DataProto) -> DataProto:
    part = part.select()
    part.meta_info = {name: value for name, value in part.meta_info.items() if name != STATE}
    return part


def of_earlier_release(parts: Mapping[str, DataProto], step: int) -> Mapping[str, DataProto]:
    """The two parts, from those of releases that had one for every kind of schedule.

    These were ``ahead``, the batch of the next step with the context that it was sampled in; ``surplus``, further
    samples; ``unfinished``, the rows of prompts in work; ``loaded_prompts``, prompts that were not begun.

    Args:
        step: that the checkpoint is of.
    """
    complete = [parts[name].select() for name in ("ahead", "surplus") if name in parts]
    if not complete and not {"unfinished", "loaded_prompts"} & set(parts):
        return parts
    context = parts["ahead"].meta_info.get("context") if "ahead" in parts else None
    for part in complete:
        part.meta_info = {name: value for name, value in part.meta_info.items() if name != "context"}
    samples = together(complete) if complete else None
    groups = [] if samples is None else _groups_of(samples)
    work = [_prompt_in_work(rows.alone()) for rows in _groups_of(parts["unfinished"])] if "unfinished" in parts else []
    oldest = [oldest_versions(rows.alone(), 1)[0] for rows in groups]
    entries = [[number, step if version is None else version, number] for number, version in enumerate(oldest)]
    entries += [[len(groups) + number, step, -1] for number in range(len(work))]
    state = {
        "version": step,
        "trained": 0,
        "counts": {"admitted": len(entries)},
        "entries": entries,
        "rows": [len(rows) for rows in groups],
        "details": [] if context is None else context["sample_info"],
        "context": context,
        BY_BATCH: True,
    }
    prompts = [*work, *([parts["loaded_prompts"]] if "loaded_prompts" in parts else [])]
    made = {FINISHED: samples, PROMPTS: together(prompts) if prompts else None}
    for part in (part for part in made.values() if part is not None):
        part.meta_info = {**part.meta_info, STATE: state}
    return {name: part for name, part in made.items() if part is not None}


def _groups_of(rows: DataProto) -> list[GroupRows]:
    """Adjacent rows of one prompt."""
    uids = rows.non_tensor_batch["uid"].astype(str)
    starts = [0, *(np.flatnonzero(uids[1:] != uids[:-1]) + 1).tolist(), len(rows)]
    return [GroupRows(rows, start, stop) for start, stop in pairwise(starts)]


def _prompt_in_work(rows: DataProto) -> DataProto:
    """The prompt of adjacent rows, with the state of each."""
    names = [name for name in rows.non_tensor_batch if name not in (EARLIER, "sample_index")]
    prompt = rows.slice(0, 1).select(non_tensor_batch_keys=names)
    prompt.non_tensor_batch[EARLIER] = object_array([list(rows.non_tensor_batch[EARLIER])])
    return prompt


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
