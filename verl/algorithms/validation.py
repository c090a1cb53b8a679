"""Scores of several samples per prompt: mean@n, std@n, pass@k, best@k, worst@k and maj@k.

best@k, worst@k and maj@k ask what a user who draws k samples would get. They are bootstrapped: k of a prompt's n
samples are drawn with replacement, 1000 times, and the mean and the standard deviation over the draws are reported.
pass@k draws without replacement: the unbiased estimate that one of k samples is right (Chen et al. 2021,
arXiv:2107.03374), 1 at k = n where one of n is right. There best@n is less, as its draws can miss that one.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from verl.errors import DataError
from verl.metrics import notice

NUM_DRAWS = 1000
RIGHT_FROM, SCORES = 1.0, ("acc", "reward", "score")
"""A sample is right if one of these is at least that, ``acc`` where it is a number."""


@functools.lru_cache(maxsize=64)
def draws_of(num_items: int, subset_size: int, n_bootstrap: int, seed: int) -> np.ndarray:
    """(n_bootstrap, subset_size) indices, drawn with replacement."""
    return np.random.default_rng(seed).integers(0, num_items, size=(n_bootstrap, subset_size))


def pass_at(k: int, num_right: int, num_samples: int) -> float:
    """1 - C(n-c, k) / C(n, k): the probability that one of k of n samples is right, of which c are."""
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def subset_sizes(num_samples: int) -> list[int]:
    """2, 4, 8, ... below the number of samples, and that number."""
    sizes = []
    size = 2
    while size < num_samples:
        sizes.append(size)
        size *= 2
    return [*sizes, num_samples]


def process_validation_metrics(
    data_sources: Sequence[str],
    sample_uids: Sequence[Hashable],
    infos_dict: Mapping[str, Sequence[Any]],
    seed: int = 42,
    expected_acc_counts: Mapping[str, int] | None = None,
) -> dict[str, dict[str, dict[str, float]]]:
    """Metrics of every numeric variable, averaged over the prompts of each data source.

    Args:
        data_sources, sample_uids: per sample, where it is from and which prompt it answers.
        infos_dict: name -> one entry per sample (``reward``, ``acc``, ...); ``pred`` holds the answers to vote on.
            Names with text are not averaged; a sample whose entry is None or NaN has no such value and is left out.
        seed: of the bootstrap.
        expected_acc_counts: data source -> samples that should have an ``acc``; a shortfall gives a notice.

    Returns:
        data source -> variable -> ``mean@n``; with several samples per prompt also ``std@n``, ``best@k/mean``,
        ``best@k/std``, ``worst@k/...``, with ``pred`` ``maj@k/...`` and for scores ``pass@k``, for k = 2, 4, 8, .., n.
    """
    for name, entries in infos_dict.items():
        if len(entries) != len(data_sources):
            raise DataError(f"{len(entries)} values of {name!r} for {len(data_sources)} validation samples", key=name)
    groups: dict[str, dict[Hashable, list[int]]] = defaultdict(lambda: defaultdict(list))
    for row, (source, uid) in enumerate(zip(data_sources, sample_uids)):
        groups[source][uid].append(row)
    metrics: dict[str, dict[str, dict[str, float]]] = {}
    for source, prompts in groups.items():
        rows_of_source = [row for rows in prompts.values() for row in rows]
        _check_count(source, rows_of_source, infos_dict, expected_acc_counts)
        metrics[source] = {
            name: _average([_prompt_metrics(name, rows, infos_dict, seed) for rows in prompts.values()])
            for name, entries in infos_dict.items()
            if is_numeric([entries[row] for row in rows_of_source])
        }
    return metrics


def _prompt_metrics(name: str, rows: list[int], infos_dict: Mapping[str, Sequence[Any]], seed: int) -> dict[str, float]:
    """The metrics of one variable over the samples of one prompt."""
    entries, n = infos_dict[name], len(rows)
    rows = [row for row in rows if entries[row] is not None and not np.isnan(entries[row])]
    values = np.array([entries[row] for row in rows], dtype=np.float64)
    if len(values) == 0:
        return {}
    metrics = {f"mean@{n}": float(values.mean())}
    if n == 1:
        return metrics
    metrics[f"std@{n}"] = float(values.std())
    votes = _vote_codes([infos_dict["pred"][row] for row in rows]) if "pred" in infos_dict else None
    judged = infos_dict.get("acc", entries)
    right = [(judged[row] if is_numeric([judged[row]]) else entries[row]) >= RIGHT_FROM for row in rows]
    for k in subset_sizes(n):
        if name in SCORES and k <= len(right):
            metrics[f"pass@{k}"] = pass_at(k, sum(right), len(right))
        draws = draws_of(len(values), k, NUM_DRAWS, seed)
        drawn = values[draws]
        results = {f"best@{k}": drawn.max(axis=1), f"worst@{k}": drawn.min(axis=1)}
        if votes is not None:
            results[f"maj@{k}"] = _majority(drawn, votes[draws])
        for label, numbers in results.items():
            metrics[f"{label}/mean"], metrics[f"{label}/std"] = float(numbers.mean()), float(numbers.std())
    return metrics


def _vote_codes(predictions: Sequence[Any]) -> np.ndarray:
    """(n,) int: equal answers get equal numbers; answers that cannot be hashed are compared by their text."""
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(repr(prediction), len(numbers)) for prediction in predictions])


def _majority(drawn: np.ndarray, votes: np.ndarray) -> np.ndarray:
    """(draws, k) values and votes -> (draws,): the value of the first item whose answer has the most votes."""
    support = (votes[:, :, None] == votes[:, None, :]).sum(axis=-1)
    return drawn[np.arange(len(drawn)), support.argmax(axis=1)]


def _average(per_prompt: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean over the prompts that have the metric (prompts may have different numbers of samples)."""
    collected: dict[str, list[float]] = defaultdict(list)
    for metrics in per_prompt:
        for name, value in metrics.items():
            collected[name].append(value)
    return {name: float(np.mean(values)) for name, values in collected.items()}


def is_numeric(entries: Iterable[Any]) -> bool:
    """Every entry is a number or None, and one is a number."""
    present = [entry for entry in entries if entry is not None]
    return bool(present) and all(isinstance(entry, (bool, int, float, np.number, np.bool_)) for entry in present)


def _check_count(
    source: str, rows: Sequence[int], infos_dict: Mapping[str, Sequence[Any]], expected: Mapping[str, int] | None
) -> None:
    if expected is None or source not in expected:
        return
    accuracies = infos_dict.get("acc", [None] * (max(rows) + 1))
    count = sum(accuracies[row] is not None for row in rows)
    if count != expected[source]:
        notice(f"validation/{source}", f"{count} of {expected[source]} samples have an accuracy")


def bootstrap_metric(
    data: Sequence[Any],
    subset_size: int,
    reduce_fns: Sequence[Callable[[list[Any]], float]],
    n_bootstrap: int = NUM_DRAWS,
    seed: int = 42,
) -> list[tuple[float, float]]:
    """Mean and standard deviation of each reduction over random subsets of ``data`` (with replacement)."""
    draws = draws_of(len(data), subset_size, n_bootstrap, seed).tolist()
    subsets = [[data[i] for i in draw] for draw in draws]
    results = [np.array([reduce(subset) for subset in subsets], dtype=np.float64) for reduce in reduce_fns]
    return [(float(result.mean()), float(result.std())) for result in results]


def calc_maj_val(data: Sequence[Mapping[str, Any]], vote_key: str, val_key: str) -> float:
    """The value of the answer with the most votes; the first among equals."""
    votes: dict[Hashable, list[float]] = defaultdict(list)
    for item in data:
        votes[item[vote_key]].append(item[val_key])
    return max(votes.values(), key=len)[0]
