"""Steps and groups: sums over the samples' columns."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from verl.viewer.questions import Question, Row
from verl.viewer.samples import EXCERPT, STATES, SampleIndex

SORTS = ("uid", "samples", "score_mean", "score_min", "score_max", "score_spread", "length_mean", "state", "reason")
Columns = Mapping[str, np.ndarray]


def steps_of(columns: Columns) -> list[Row]:
    """A row per step: samples of its batch, their groups, mean score and length, and how many were dropped in it."""
    steps, inverse = np.unique(columns["step"], return_inverse=True)
    in_batch, size = columns["block"] >= 0, len(steps)
    if not in_batch.any():  # no files: what the journal says was trained on
        in_batch = columns["state"] == STATES.index("trained")
    samples = np.bincount(inverse[in_batch], minlength=size)
    pairs = np.unique((columns["step"][in_batch].astype(np.int64) << 32) + columns["uid"][in_batch])
    groups = np.bincount(np.searchsorted(steps, pairs >> 32), minlength=size)
    dropped = np.bincount(inverse[columns["state"] == STATES.index("dropped")], minlength=size)
    scores, lengths = (_means(columns[name], inverse, in_batch, size) for name in ("score", "length"))
    rows = zip(*(values.tolist() for values in (steps, samples, groups, scores, lengths, dropped)))
    names = ("step", "samples", "groups", "score_mean", "length_mean", "dropped")
    return [dict(zip(names, row)) for row in rows]


def groups_of(question: Question, index: SampleIndex, columns: Columns, all_rows: bool = False) -> Row:
    """The groups of a step: the samples of one prompt each, a page of them, or all, in the order of the question.

    Raises:
        DataError: a parameter has no such value.
    """
    step, (first, size) = question.count("step", 0), question.page()
    sort, descending = question.text("sort", "score_spread", SORTS), question.flag("descending")
    question.end()
    rows = np.flatnonzero(columns["step"] == step)
    uids, begins, inverse = np.unique(columns["uid"][rows], return_index=True, return_inverse=True)
    count, every = len(uids), np.ones(len(rows), dtype=bool)
    made: dict[str, np.ndarray] = {"samples": np.bincount(inverse, minlength=count)}
    scores = columns["score"][rows]
    made["score_mean"] = _means(scores, inverse, every, count)
    made["score_min"], made["score_max"] = (_extremes(scores, inverse, count, how) for how in (np.fmin, np.fmax))
    made["score_spread"] = made["score_max"] - made["score_min"]
    made["length_mean"] = _means(columns["length"][rows], inverse, every, count)
    state, reason = columns["state"][rows], columns["reason"][rows]
    made["state"] = np.full(count, -1)
    for name in ("dropped", "waiting", "trained"):  # one trained sample makes a trained group
        made["state"][inverse[state == STATES.index(name)]] = STATES.index(name)
    made["reason"] = np.full(count, -1)
    made["reason"][inverse[reason > 0]] = reason[reason > 0]
    names = np.array([index.uids.texts[uid] for uid in uids.tolist()], dtype=object)
    keys = names if sort == "uid" else made[sort].astype(float)
    order = np.argsort(keys if sort == "uid" or not descending else -keys, kind="stable")
    if sort == "uid" and descending:
        order = order[::-1]
    order = order if all_rows else order[first : first + size]
    prompts = index.texts(columns, rows[begins[order]], "input", EXCERPT)
    return {
        "total": count,
        "rows": [_group(made, names, group, prompt, index) for group, prompt in zip(order, prompts)],
    }


def _group(made: Columns, names: np.ndarray, group: int, prompt: str, index: SampleIndex) -> Row:
    row: Row = {"uid": names[group], "prompt": prompt, **{name: made[name][group].item() for name in made}}
    row["state"] = STATES[row["state"]] if row["state"] >= 0 else None
    row["reason"] = index.reasons.texts[row["reason"]] if row["reason"] > 0 else None
    return row


def _means(values: np.ndarray, inverse: np.ndarray, rows: np.ndarray, size: int) -> np.ndarray:
    """(size,) mean of the known values of each group; NaN where it has none."""
    is_present = rows & (np.isfinite(values) if values.dtype.kind == "f" else values >= 0)
    counts = np.bincount(inverse[is_present], minlength=size)
    sums = np.bincount(inverse[is_present], weights=values[is_present], minlength=size)
    return np.divide(sums, counts, out=np.full(size, np.nan), where=counts > 0)


def _extremes(values: np.ndarray, inverse: np.ndarray, size: int, how: np.ufunc) -> np.ndarray:
    made = np.full(size, np.nan)
    how.at(made, inverse, values)
    return made
