"""Numbers about a step: the batch, the clock, how metrics of several workers become one, and scores of validation.

Of several samples per prompt there are mean@n, std@n, pass@k, best@k, worst@k and maj@k.
best@k, worst@k and maj@k ask what a user who draws k samples would get, so they are bootstrapped: k of a prompt's n
samples are drawn with replacement, 1000 times, and the mean and the standard deviation over the draws are reported.
pass@k draws without replacement: the unbiased estimate that one of k samples is right (Chen et al. 2021,
arXiv:2107.03374), 1 at k = n where one of n is right. There best@n is less, as its draws can miss that one.
"""

from __future__ import annotations

import functools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.algorithms.masked import masked_mean, masked_sum, zero_outside
from verl.errors import DataError
from verl.metrics import Metric, as_float, notice
from verl.protocol import DataProto

__all__ = [
    "bootstrap_metric",
    "calc_maj_val",
    "compute_data_metrics",
    "compute_throughout_metrics",
    "compute_timing_metrics",
    "compute_variance_proxy_metrics",
    "process_validation_metrics",
    "reduce_metrics",
]

NUM_DRAWS = 1000
RIGHT_FROM, SCORES = 1.0, ("acc", "reward", "score")
"""A sample is right if one of these is at least that, ``acc`` where it is a number."""
Reduce = Callable[[np.ndarray], np.ndarray]


def reduce_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """One number per name: of `Metric` its value; of a list the mean, or what the last part of its name says.

    A name whose last part has the word ``max`` (``critic/score/max``, ``perf/max_memory_allocated_gb``) keeps the
    maximum, one with ``min`` the minimum. NaN entries are left out where there are others.
    """
    return {name: _reduce(name, value) for name, value in metrics.items()}


def _reduce(name: str, value: Any) -> float:
    if isinstance(value, Metric):
        return value.value
    if not isinstance(value, (list, tuple, np.ndarray)):
        return as_float(value)
    numbers = np.array([as_float(x.value if isinstance(x, Metric) else x) for x in value])
    numbers = numbers[~np.isnan(numbers)] if not np.isnan(numbers).all() else numbers
    words = re.split(r"[_@\-]", name.rsplit("/", 1)[-1])
    reduce = np.max if "max" in words else np.min if "min" in words else np.mean
    return float(reduce(numbers)) if len(numbers) else float("nan")


def compute_data_metrics(
    batch: DataProto,
    use_critic: bool = True,
    max_prompt_length: int | None = None,
    max_response_length: int | None = None,
) -> dict[str, float]:
    """Scores, rewards, advantages, returns, values and lengths of a batch under upstream's names.

    Args:
        batch: with token_level_scores, token_level_rewards, advantages, returns (B, T); values with a critic.
        max_prompt_length, max_response_length: the configured limits, for ``clip_ratio``; batches are padded to their
            longest row, so without them the share at the width of this batch is reported.

    A sample without response tokens was aborted: it counts in the lengths and in ``response/aborted_ratio``, not in
    the scores.
    """
    tensors = batch.tensors
    mask = tensors["response_mask"].bool()
    prompt_lengths, response_lengths = _lengths(batch)
    produced = response_lengths > 0
    metrics: dict[str, float] = {}
    for name, key in (("score", "token_level_scores"), ("rewards", "token_level_rewards")):
        totals = torch.nan_to_num(tensors[key].float()).sum(dim=-1)[produced]
        metrics |= _spread(f"critic/{name}", totals)
    for name in ("advantages", "returns"):
        metrics |= _spread(f"critic/{name}", tensors[name][mask].float())
    if use_critic:
        values, returns = tensors["values"][mask].float(), tensors["returns"][mask].float()
        metrics |= _spread("critic/values", values)
        metrics["critic/vf_explained_var"] = explained_variance(values, returns)
    widths = tensors["prompts"].shape[-1], tensors["responses"].shape[-1]
    metrics |= _length_metrics("response_length", response_lengths, max_response_length or widths[1])
    metrics |= _length_metrics(
        "response_length_non_aborted", response_lengths[produced], max_response_length or widths[1]
    )
    metrics["response/aborted_ratio"] = 1.0 - produced.float().mean().item()
    metrics |= _length_metrics("prompt_length", prompt_lengths, max_prompt_length or widths[0])
    for name, key in (("num_turns", "__num_turns__"), ("tool_call_counts", "tool_call_counts")):
        column = [value for value in batch.non_tensor_batch.get(key, ()) if value is not None]  # other loops have none
        if column:
            metrics |= _spread(name, torch.tensor(np.asarray(column, dtype=np.float64)))
    return metrics


def _compute_response_info(batch: DataProto) -> dict[str, Tensor]:
    """Under a name that recipes import: ``response_mask`` (B, T), ``prompt_length`` and ``response_length`` (B,)."""
    prompts, responses = _lengths(batch)
    mask = batch.tensors["attention_mask"][:, -batch.tensors["responses"].shape[-1] :]
    return {"response_mask": mask, "prompt_length": prompts.float(), "response_length": responses.float()}


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """``1 - Var(returns - values) / (Var(returns) + 1e-5)``; 0 with fewer than two numbers."""
    if len(values) < 2:
        return 0.0
    return (1.0 - (returns - values).var() / (returns.var() + 1e-5)).item()


TIMED_OVER_RESPONSES = ("gen",)
TIMED_OVER_ALL_TOKENS = ("ref", "values", "adv", "update_critic", "update_actor", "old_log_prob")


def compute_timing_metrics(batch: DataProto, timing_raw: Mapping[str, float]) -> dict[str, float]:
    """``timing_s/<stage>`` of every stage, and ``timing_per_token_ms/<stage>`` of those whose cost is in tokens."""
    prompt_lengths, response_lengths = _lengths(batch)
    responses = int(response_lengths.sum())
    tokens = responses + int(prompt_lengths.sum())
    counts = dict.fromkeys(TIMED_OVER_RESPONSES, responses) | dict.fromkeys(TIMED_OVER_ALL_TOKENS, tokens)
    seconds = {f"timing_s/{name}": value for name, value in timing_raw.items()}
    per_token = {
        f"timing_per_token_ms/{name}": timing_raw[name] * 1000 / count
        for name, count in counts.items()
        if name in timing_raw and count > 0
    }
    return seconds | per_token


def compute_throughout_metrics(batch: DataProto, timing_raw: Mapping[str, float], n_gpus: int) -> dict[str, float]:
    """Tokens of the step, its seconds, and tokens per second and device.

    Args:
        timing_raw: seconds per stage, with ``step`` for the whole.
        n_gpus: devices of the run; 1 on a CPU.
    """
    counted: Sequence[int] | None = batch.meta_info.get("global_token_num")
    tokens = sum(counted) if counted is not None else sum(int(lengths.sum()) for lengths in _lengths(batch))
    seconds = timing_raw["step"]
    return {
        "perf/total_num_tokens": tokens,
        "perf/time_per_step": seconds,
        "perf/throughput": tokens / (seconds * n_gpus) if seconds > 0 else 0.0,
    }


@torch.no_grad()
def compute_variance_proxy_metrics(batch: DataProto, gradient_norm: float | None = None) -> dict[str, float]:
    """How much of the policy gradient is signal (``variance_proxy/*``); empty without ``sum_pi_squared`` in the batch.

    The squared gradient of a response with respect to its logits is taken for W = sum of w_t over its tokens, with
    w_t = 1 - 2 pi(y_t) + sum_v pi(v)^2, times the squared importance weight where there is one. With A the mean
    advantage of a response and N responses::

        proxy1_signal_strength  S = gradient_norm^2
        proxy2_total_power      P = mean of W A^2
        proxy3_pure_noise       (P - S) / (N - 1)

    Args:
        batch: with sum_pi_squared, old_log_probs, advantages, response_mask (B, T).
        gradient_norm: of the update; None leaves out what needs it.
    """
    tensors = batch.tensors
    if not {"sum_pi_squared", "old_log_probs", "advantages"} <= set(tensors.keys()):
        return {}
    mask = tensors["response_mask"]
    counted = mask.bool().any(dim=-1)
    if not counted.any():
        return {}
    proxy = 1 - 2 * zero_outside(tensors["old_log_probs"], mask).exp() + zero_outside(tensors["sum_pi_squared"], mask)
    if "rollout_is_weights" in tensors.keys():
        proxy = proxy * tensors["rollout_is_weights"] ** 2
    weight = masked_sum(proxy, mask, axis=-1)[counted]
    squared = masked_mean(tensors["advantages"], mask, axis=-1)[counted] ** 2
    power = (weight * squared).mean().item()
    proxies = {
        "proxy2_total_power": power,
        "expected_a_squared": squared.mean().item(),
        "expected_w": weight.mean().item(),
    }
    if gradient_norm is not None:
        proxies["proxy1_signal_strength"] = gradient_norm**2
        if len(weight) > 1:
            proxies["proxy3_pure_noise"] = (power - gradient_norm**2) / (len(weight) - 1)
    return {f"variance_proxy/{name}": value for name, value in proxies.items()}


def _lengths(batch: DataProto) -> tuple[Tensor, Tensor]:
    """(B,) and (B,): real tokens of each prompt and of each response, observations included."""
    tensors = batch.tensors
    attention, width = tensors["attention_mask"].bool(), tensors["responses"].shape[-1]
    split = attention.shape[-1] - width
    return attention[:, :split].sum(dim=-1), attention[:, split:].sum(dim=-1)


def _spread(name: str, values: Tensor) -> dict[str, float]:
    """Mean, maximum and minimum; zeros if there are no values, so that curves have no gaps."""
    values = values if len(values) else torch.zeros(1)
    numbers = torch.stack([values.mean(), values.max(), values.min()]).tolist()
    return dict(zip((f"{name}/mean", f"{name}/max", f"{name}/min"), numbers))


def _length_metrics(name: str, lengths: Tensor, limit: int) -> dict[str, float]:
    at_limit = (lengths >= limit).float().mean().item() if len(lengths) else 0.0
    return {**_spread(name, lengths.float()), f"{name}/clip_ratio": at_limit}


@functools.lru_cache(maxsize=64)
def _draws(num_items: int, subset_size: int, n_bootstrap: int, seed: int) -> np.ndarray:
    """(n_bootstrap, subset_size) indices, drawn with replacement."""
    return np.random.default_rng(seed).integers(0, num_items, size=(n_bootstrap, subset_size))


def bootstrap_metric(
    data: Sequence[Any],
    subset_size: int,
    reduce_fns: Sequence[Callable[[list[Any]], float]],
    n_bootstrap: int = NUM_DRAWS,
    seed: int = 42,
) -> list[tuple[float, float]]:
    """Mean and standard deviation of each reduction over random subsets of ``data`` (with replacement)."""
    draws = _draws(len(data), subset_size, n_bootstrap, seed).tolist()
    subsets = [[data[i] for i in draw] for draw in draws]
    results = [np.array([reduce(subset) for subset in subsets], dtype=np.float64) for reduce in reduce_fns]
    return [(float(result.mean()), float(result.std())) for result in results]


def calc_maj_val(data: Sequence[Mapping[str, Any]], vote_key: str, val_key: str) -> float:
    """The value of the answer with the most votes; the first among equals."""
    votes: dict[Hashable, list[float]] = defaultdict(list)
    for item in data:
        votes[item[vote_key]].append(item[val_key])
    return max(votes.values(), key=len)[0]


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
        draws = _draws(len(values), k, NUM_DRAWS, seed)
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
