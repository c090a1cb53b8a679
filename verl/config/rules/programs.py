"""Rules of batch generation and of evaluation, checked before a model is loaded or anything is scored."""

from __future__ import annotations

from verl.config.machine import models, pools
from verl.config.rules.checks import (
    Problems,
    bad_model_folder,
    collect,
    known_name,
    missing_files,
    missing_folder,
)
from verl.config.rules.rule import judged, out_of_bounds
from verl.config.rules.sections import TABLE
from verl.config.schema.generation import EvaluationConfig, GenerationConfig
from verl.config.schema.node import unrecorded
from verl.errors import ConfigError
from verl.registry import SAMPLERS


def validate_generation(cfg: GenerationConfig) -> None:
    """All problems in one `ConfigError`."""
    with unrecorded():
        collect((_names_of_generation, out_of_bounds, judged(TABLE), _sampler, _files_of_generation), cfg)


def _names_of_generation(cfg: GenerationConfig) -> Problems:
    problems = known_name(SAMPLERS, "rollout.name", cfg.rollout.name, "Set rollout.name=hf.")
    if cfg.rollout.name == "server" and not cfg.rollout.server.url:
        fix = "Set rollout.server.url=http://host:port."
        problems.append(ConfigError("needs the address of a server", key="rollout.name", got="server", fix=fix))
    return problems


def _sampler(cfg: GenerationConfig) -> Problems:
    problems = pools.sizes("rollout", cfg.rollout)
    if not problems:
        problems += pools.on_machine("rollout", cfg.rollout, cfg.trainer.device)
    return problems


def _files_of_generation(cfg: GenerationConfig) -> Problems:
    problems = missing_files("data.path", cfg.data.path) + bad_model_folder("model.path", cfg.model.path)
    problems += models.vision_problems("model.path", cfg.model.path, cfg.model.external_lib)
    if not cfg.data.output_path.endswith(".parquet"):
        fix = "End its name in .parquet."
        problems.append(ConfigError("is written as parquet", key="data.output_path", got=cfg.data.output_path, fix=fix))
    folder = cfg.data.output_path.rpartition("/")[0]
    return problems if not folder or "://" in folder else problems + missing_folder("data.output_path", folder)


def validate_evaluation(cfg: EvaluationConfig) -> None:
    """All problems in one `ConfigError`."""
    with unrecorded():
        collect((out_of_bounds, _files_of_evaluation), cfg)


def _files_of_evaluation(cfg: EvaluationConfig) -> Problems:
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
