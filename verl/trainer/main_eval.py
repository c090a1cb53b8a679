"""``python -m verl.trainer.main_eval data.path=answers.parquet ...``: scores what batch generation wrote."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import pyarrow.parquet as pq

from verl.config import load_config
from verl.config.schema.generation import EvaluationConfig
from verl.errors import ConfigError
from verl.json_text import without_nan
from verl.metrics import notice
from verl.rewards.dispatch import answer_of, check_data_sources, default_compute_score, runs_programs
from verl.rewards.function import RewardFunction, load_reward_function
from verl.rewards.programs import code_runner
from verl.rewards.samples import RewardFailure, RewardResult, RewardSample
from verl.rewards.scoring import Scorer, ScoringLimits
from verl.rewards.truths import check_setting, check_truths
from verl.trainer import evaluation
from verl.trainer.command import run_program
from verl.trainer.evaluation import Answers


def run_eval(config: EvaluationConfig) -> str:
    """Run a checked configuration: write the files that it names, and return the report."""
    custom = config.custom_reward_function
    kwargs = dict(custom.reward_kwargs)
    function = (
        load_reward_function(custom.path, custom.name, kwargs)
        if custom.path
        else RewardFunction.of(default_compute_score, kwargs)
    )
    check_setting(function, config.reward.ground_truth)
    scorer = Scorer(function, ScoringLimits(timeout=config.report.timeout, num_workers=config.report.num_workers))
    answers, results = _scored(config, scorer, config.data.path, "data.path")
    settings = config.report
    reports = evaluation.report_sources(answers, results, settings.right_from, settings.seed)
    differences = None
    if settings.compare:
        other, theirs = _scored(config, scorer, settings.compare, "report.compare")
        differences = evaluation.compare_runs(answers, results, other, theirs, settings.seed)
    scorer.close()
    text = evaluation.markdown(reports, differences)
    if settings.markdown:
        Path(settings.markdown).write_text(text, encoding="utf-8")
    if settings.json:
        numbers: dict[str, Any] = {f"test_score/{source}": one.mean for source, one in reports.items()}
        numbers["data_sources"] = {source: asdict(one) for source, one in reports.items()}
        if differences is not None:
            numbers["differences"] = {source: asdict(gap) for source, gap in differences.items()}
        Path(settings.json).write_text(json.dumps(without_nan(numbers), indent=1) + "\n", encoding="utf-8")
    if settings.samples:
        pq.write_table(evaluation.sample_table(answers, results), settings.samples)
    return text


def _scored(config: EvaluationConfig, scorer: Scorer, path: str, key: str) -> tuple[Answers, list[RewardResult]]:
    """The answers of a file and their scores; the first failure is shown, the others are counted."""
    builtin = scorer.function.is_builtin
    has_truths = config.reward.ground_truth != "none"
    answers = evaluation.read_answers(path, config.data, key, needs_source=builtin, has_truths=has_truths)
    if has_truths:
        truths = [{"ground_truth": sample.ground_truth} for sample in answers.samples]
        check_truths(scorer.function, truths, lambda row: f"{path}, row {answers.samples[row].row}")
    if builtin:
        sources = [sample.data_source for sample in answers.samples]
        check_data_sources(sources, config.data.data_source_key)
        if any(map(runs_programs, sources)):
            options = scorer.function.reward_kwargs
            places = options.get("max_concurrent", 64)
            code_runner(options.get("sandbox_fusion_url"), places, options.get("memory_limit_mb")).check()
    results = scorer.score(answers.samples)
    if builtin:
        results = [_with_answer(sample, result) for sample, result in zip(answers.samples, results, strict=True)]
    _report(key, "answers have no score", answers, [result.failure for result in results])
    caught = "answers made the built-in scorer fail and are scored as empty ones"
    _report(f"{key}, built-in scorer", caught, answers, [result.caught for result in results])
    return answers, results


def _report(key: str, became: str, answers: Answers, failures: Sequence[RewardFailure | None]) -> None:
    failed = [(sample, failure) for sample, failure in zip(answers.samples, failures, strict=True) if failure]
    if failed:
        sample, failure = failed[0]
        at = f" ({failure.line})" if failure.line else ""
        notice(
            key,
            f"{len(failed)} of {len(failures)} {became}; the first, {sample.place}: {failure.message}{at}",
        )


def _with_answer(sample: RewardSample, result: RewardResult) -> RewardResult:
    """A result with the answer that was read, for the vote of a majority; an answer that was not found votes, too."""
    if result.failure is not None or "pred" in result.extra or runs_programs(sample.data_source):
        return result
    answer = answer_of(sample.data_source, sample.solution_str)
    return replace(result, extra={**result.extra, "pred": answer or ""})


def with_compare(argv: Sequence[str]) -> list[str]:
    """``--compare FILE`` (or ``--compare=FILE``) as the setting that it means."""
    words, made = iter(argv), []
    for word in words:
        option, equals, value = word.partition("=")
        if option != "--compare":
            made.append(word)
            continue
        value = value if equals else next(words, "")
        if not value:
            raise ConfigError("a file with the answers of another run is needed", key="--compare")
        made.append(f"report.compare={value}")
    return made


def main(argv: list[str] | None = None) -> int:
    """Command line; a user's error is one message and exit status 2."""
    words = sys.argv[1:] if argv is None else argv
    return run_program(lambda: print(run_eval(cast(EvaluationConfig, load_config("evaluation", with_compare(words))))))


if __name__ == "__main__":
    sys.exit(main())
