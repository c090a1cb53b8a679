"""Rules of evaluation between its settings, checked before anything is scored."""

from __future__ import annotations

from verl.config.rules.checks import Problems, collect, missing_files, missing_folder
from verl.config.rules.rule import out_of_bounds
from verl.config.schema.evaluation import EvaluationConfig
from verl.config.schema.node import unrecorded
from verl.errors import ConfigError


def validate_evaluation(cfg: EvaluationConfig) -> None:
    """All problems in one `ConfigError`."""
    with unrecorded():
        collect((out_of_bounds, _files), cfg)


def _files(cfg: EvaluationConfig) -> Problems:
    report = cfg.report
    problems = missing_files("data.path", cfg.data.path)
    problems += missing_files("custom_reward_function.path", cfg.custom_reward_function.path)
    problems += missing_files("report.compare", report.compare)
    for name in ("markdown", "json", "samples"):
        folder = (report[name] or "").rpartition("/")[0]
        problems += missing_folder(f"report.{name}", folder) if folder else []
    if report.samples is not None and not report.samples.endswith(".parquet"):
        fix = "End its name in .parquet."
        problems.append(ConfigError("is written as parquet", key="report.samples", got=report.samples, fix=fix))
    return problems
