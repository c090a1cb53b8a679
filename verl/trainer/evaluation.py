"""Scores of generated answers: mean@n, pass@k, best@k, maj@k, intervals, and the difference of two runs.

A prompt is the unit of every interval: prompts are resampled (a bootstrap), answers of one prompt stay together.
pass@k is the probability that one of k answers drawn without replacement is right (Chen et al. 2021, arXiv:2107.03374).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from verl.algorithms.validation import pass_at, process_validation_metrics, subset_sizes
from verl.config.schema.generation import EvaluationDataConfig
from verl.data.files import read_files, require_column
from verl.errors import DataError
from verl.rewards.samples import RewardResult, RewardSample

DRAWS = 2000
INTERVAL = (2.5, 97.5)
"""Percentiles of the bootstrap that bound an interval."""


@dataclass(frozen=True)
class Answers:
    """The answers of one run: a sample per answer, and which prompt each belongs to.

    Args:
        samples: in the order of the file; ``prompts`` has the number of the row that each answers.
        texts: the prompt of each row, to find the same prompt in another run.
    """

    samples: list[RewardSample]
    prompts: list[int]
    texts: list[str]


def read_answers(
    path: str, data: EvaluationDataConfig, key: str, needs_source: bool, has_truths: bool = True
) -> Answers:
    """The answers in a file, with what the scorer needs of each row.

    Args:
        needs_source: a built-in scorer is picked by the data source, so that its column has to be there.
        has_truths: rows have a column with the ground truth.

    Raises:
        DataError: a missing column, a row without answers, or something that is no text.
    """
    table, origin = read_files(path, key=key)
    columns = [data.response_key]
    columns += [data.reward_model_key] if has_truths else []
    columns += [data.data_source_key] if needs_source else []
    for column in columns:
        require_column(column, table.column_names, file=origin.files[0], key=f"data.{_setting_of(column, data)}")
    samples, prompts, texts = [], [], []
    for number, row in enumerate(table.to_pylist()):
        answers = row[data.response_key]
        answers = [answers] if isinstance(answers, str) else list(answers or [])
        if not answers or not all(isinstance(answer, str) for answer in answers):
            raise DataError(f"no text in the column {data.response_key!r}", key=origin.describe(number), got=answers)
        source = row.get(data.data_source_key)
        holder = row[data.reward_model_key] if has_truths else {}
        if not isinstance(holder, dict):
            fault = f"no fields in the column {data.reward_model_key!r}"
            raise DataError(fault, key=origin.describe(number), got=holder, allowed='{"ground_truth": ...}')
        truth = holder.get("ground_truth")
        for answer in answers:
            samples.append(RewardSample(source, answer, truth, row.get("extra_info"), row=number))
            prompts.append(number)
        texts.append(repr(row.get(data.prompt_key)))
    return Answers(samples, prompts, texts)


def _setting_of(column: str, data: EvaluationDataConfig) -> str:
    names = ("response_key", "reward_model_key", "data_source_key")
    return next(name for name in names if data[name] == column)


@dataclass
class SourceReport:
    """The results of one data source.

    Args:
        metrics: ``mean@n``, ``pass@k``, ``best@k/mean``, ``maj@k/mean`` and so on, averaged over the prompts.
        interval: bounds of the mean score, 95 %.
        unscorable: answers for which the scorer failed; they count for nothing.
    """

    prompts: int
    answers: int
    mean: float
    interval: tuple[float, float]
    unscorable: int
    metrics: dict[str, float] = field(default_factory=dict)


def report_sources(
    answers: Answers, results: Sequence[RewardResult], right_from: float, seed: int
) -> dict[str, SourceReport]:
    """The results of every data source, in the order of their names."""
    sources = [str(sample.data_source) for sample in answers.samples]
    scores = [result.score for result in results]
    infos: dict[str, list[Any]] = {"score": list(scores)}
    for name in ("acc", "pred"):
        reported = [result.extra.get(name) for result in results]
        if any(value is not None for value in reported):
            infos[name] = reported
    voted = process_validation_metrics(sources, answers.prompts, infos, seed=seed)
    found_reports = {}
    for source in sorted(set(sources)):
        rows = [i for i, name in enumerate(sources) if name == source]
        by_prompt = _grouped(rows, answers.prompts, scores)
        right = [_is_right(results[i], right_from) for i in range(len(results))]
        metrics = pass_at_k(_grouped(rows, answers.prompts, right))
        for name, of in voted[source].items():
            metrics |= {f"{name}/{kind}": value for kind, value in of.items() if not kind.startswith("pass@")}
        means = [float(np.mean(values)) for values in by_prompt.values() if values]
        found_reports[source] = SourceReport(
            prompts=len(by_prompt),
            answers=len(rows),
            mean=float(np.mean(means)) if means else math.nan,
            interval=interval(means, seed),
            unscorable=sum(scores[i] is None for i in rows),
            metrics=metrics,
        )
    return found_reports


def _grouped(rows: Sequence[int], prompts: Sequence[int], values: Sequence[Any]) -> dict[int, list[Any]]:
    """prompt -> the values of its answers; an answer without one is left out, its prompt is not."""
    groups: dict[int, list[Any]] = {}
    for i in rows:
        group_values = groups.setdefault(prompts[i], [])
        if values[i] is not None:
            group_values.append(values[i])
    return groups


def _is_right(result: RewardResult, right_from: float) -> bool | None:
    if result.score is None:
        return None
    value = result.extra.get("acc", result.score)
    return bool(value >= right_from) if isinstance(value, (bool, int, float)) else None


def pass_at_k(right: Mapping[int, Sequence[bool]]) -> dict[str, float]:
    """``pass@k`` for k = 1, 2, 4, ..., n, each over the prompts that have k answers.

    Of n answers of a prompt c are right: 1 - C(n-c, k) / C(n, k).
    """
    longest = max((len(values) for values in right.values()), default=0)
    estimates = {}
    for k in [1, *subset_sizes(longest)] if longest > 1 else [1] * (longest > 0):
        chances = []
        for values in right.values():
            if len(values) >= k:
                chances.append(pass_at(k, sum(values), len(values)))
        estimates[f"pass@{k}"] = float(np.mean(chances))
    return estimates


def interval(values: Sequence[float], seed: int) -> tuple[float, float]:
    """Bounds of a mean over prompts: percentiles of the means of resampled prompts."""
    if not values:
        return math.nan, math.nan
    drawn = np.random.default_rng(seed).integers(0, len(values), size=(DRAWS, len(values)))
    low, high = np.percentile(np.asarray(values, dtype=np.float64)[drawn].mean(axis=1), INTERVAL)
    return float(low), float(high)


@dataclass(frozen=True)
class Difference:
    """This run minus another, over the prompts that both answer.

    Args:
        better: share of the draws in which this run is the better one.
    """

    prompts: int
    mean: float
    interval: tuple[float, float]
    better: float


def compare_runs(
    answers: Answers, results: Sequence[RewardResult], other: Answers, theirs: Sequence[RewardResult], seed: int
) -> dict[str, Difference]:
    """The difference of two runs by data source; prompts are matched by their text, and drawn in pairs.

    Raises:
        DataError: the two have no prompt in common.
    """
    ours, others = _by_text(answers, results), _by_text(other, theirs)
    shared = sorted(set(ours) & set(others))
    if not shared:
        raise DataError("the two files have no prompt in common", key="report.compare", got=f"{len(others)} prompts")
    differences = {}
    for source in sorted({source for source, _ in shared}):
        gaps = np.array([ours[key] - others[key] for key in shared if key[0] == source])
        drawn = np.random.default_rng(seed).integers(0, len(gaps), size=(DRAWS, len(gaps)))
        means = gaps[drawn].mean(axis=1)
        low, high = np.percentile(means, INTERVAL)
        better = float((means > 0).mean() + (means == 0).mean() / 2)
        differences[source] = Difference(len(gaps), float(gaps.mean()), (float(low), float(high)), better)
    return differences


def _by_text(answers: Answers, results: Sequence[RewardResult]) -> dict[tuple[str, str], float]:
    """(data source, prompt) -> mean score of its answers that have one."""
    scores_of: dict[tuple[str, str], list[float]] = {}
    for sample, prompt, result in zip(answers.samples, answers.prompts, results):
        if result.score is not None:
            scores_of.setdefault((str(sample.data_source), answers.texts[prompt]), []).append(result.score)
    return {key: float(np.mean(scores)) for key, scores in scores_of.items()}


def sample_table(answers: Answers, results: Sequence[RewardResult]) -> pa.Table:
    """A row per answer: prompt, data source, answer, truth, score, the scorer's other values, and why there is none."""
    rows = []
    for sample, prompt, result in zip(answers.samples, answers.prompts, results):
        rows.append(
            {
                "row": prompt,
                "prompt": answers.texts[prompt],
                "data_source": str(sample.data_source),
                "response": sample.solution_str,
                "ground_truth": str(sample.ground_truth),
                "score": result.score,
                "acc": _number(result.extra.get("acc")),
                "pred": None if result.extra.get("pred") is None else str(result.extra["pred"]),
                "failure": None if result.failure is None else result.failure.message,
            }
        )
    return pa.Table.from_pylist(rows)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (bool, int, float)) else None


def markdown(reports: Mapping[str, SourceReport], differences: Mapping[str, Difference] | None = None) -> str:
    """The report as text."""
    lines = ["# Evaluation", "", "| data source | prompts | answers | mean score | 95 % | unscorable |",
             "| --- | --- | --- | --- | --- | --- |"]  # fmt: skip
    for source, one in reports.items():
        bounds = f"{one.interval[0]:.4f} to {one.interval[1]:.4f}"
        lines.append(f"| {source} | {one.prompts} | {one.answers} | {one.mean:.4f} | {bounds} | {one.unscorable} |")
    for source, one in reports.items():
        lines += ["", f"## {source}", "", "| metric | value |", "| --- | --- |"]
        lines += [f"| {name} | {value:.4f} |" for name, value in one.metrics.items()]
    if differences:
        lines += ["", "## This run minus the other", "", "| data source | prompts | difference | 95 % | better in |",
                  "| --- | --- | --- | --- | --- |"]  # fmt: skip
        for source, gap in differences.items():
            bounds = f"{gap.interval[0]:+.4f} to {gap.interval[1]:+.4f}"
            lines.append(f"| {source} | {gap.prompts} | {gap.mean:+.4f} | {bounds} | {100 * gap.better:.1f} % |")
    return "\n".join([*lines, ""])
