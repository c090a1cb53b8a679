"""Numbers about a step, its batch and its clock, under upstream's names; at the end what only users' code calls."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.algorithms.validation import bootstrap_metric, calc_maj_val, process_validation_metrics
from verl.algorithms.variance_proxies import variance_proxies
from verl.metrics import Metric, as_float
from verl.protocol import DataProto
from verl.trainer.ppo.sample_rows import last_rows, per_sample

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
            longest row: without them the share at the width of this batch is reported.

    A sample without response tokens was aborted: it counts in the lengths and in ``response/aborted_ratio``, not in
    the scores.
    """
    tensors = batch.tensors
    mask = tensors["response_mask"].bool()
    prompt_lengths, response_lengths = _lengths(batch)
    produced = response_lengths > 0
    has_answer = per_sample(batch, produced.long()) > 0
    metrics: dict[str, float] = {}
    for name, key in (("score", "token_level_scores"), ("rewards", "token_level_rewards")):
        totals = per_sample(batch, torch.nan_to_num(tensors[key].float()).sum(dim=-1))[has_answer]
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
    of_samples = last_rows(batch.select(batch_keys=["response_mask"])).non_tensor_batch
    for name, key in (("num_turns", "__num_turns__"), ("tool_call_counts", "tool_call_counts")):
        column = [value for value in of_samples.get(key, ()) if value is not None]  # other loops have none
        if column:
            metrics |= _spread(name, torch.tensor(np.asarray(column, dtype=np.float64)))
    return metrics


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
        timing_raw: seconds per stage, and of all of them as ``step``.
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


def compute_variance_proxy_metrics(batch: DataProto, gradient_norm: float | None = None) -> dict[str, float]:
    """``variance_proxy/*`` of `variance_proxies`; empty without ``sum_pi_squared`` in the batch."""
    tensors = batch.tensors
    if not {"sum_pi_squared", "old_log_probs", "advantages"} <= set(tensors.keys()):
        return {}
    proxies = variance_proxies(
        tensors["advantages"],
        tensors["old_log_probs"],
        tensors["sum_pi_squared"],
        tensors["response_mask"],
        tensors.get("rollout_is_weights", None),
        gradient_norm,
    )
    return {f"variance_proxy/{name}": value for name, value in proxies.items()}


def _lengths(batch: DataProto) -> tuple[Tensor, Tensor]:
    """(B,) and (B,): real tokens of each prompt and of each response, observations included."""
    tensors = batch.tensors
    attention, width = tensors["attention_mask"].bool(), tensors["responses"].shape[-1]
    split = attention.shape[-1] - width
    return attention[:, :split].sum(dim=-1), attention[:, split:].sum(dim=-1)


def _spread(name: str, values: Tensor) -> dict[str, float]:
    """Mean, maximum and minimum; zeros if there are no values: curves have no gaps."""
    values = values if len(values) else torch.zeros(1)
    numbers = torch.stack([values.mean(), values.max(), values.min()]).tolist()
    return dict(zip((f"{name}/mean", f"{name}/max", f"{name}/min"), numbers))


def _length_metrics(name: str, lengths: Tensor, limit: int) -> dict[str, float]:
    at_limit = (lengths >= limit).float().mean().item() if len(lengths) else 0.0
    return {**_spread(name, lengths.float()), f"{name}/clip_ratio": at_limit}


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


def _compute_response_info(batch: DataProto) -> dict[str, Tensor]:
    """Under a name that recipes import: ``response_mask`` (B, T), ``prompt_length`` and ``response_length`` (B,)."""
    prompts, responses = _lengths(batch)
    mask = batch.tensors["attention_mask"][:, -batch.tensors["responses"].shape[-1] :]
    return {"response_mask": mask, "prompt_length": prompts.float(), "response_length": responses.float()}
