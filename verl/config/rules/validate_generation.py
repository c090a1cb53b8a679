"""Rules of batch generation between its settings, checked before the model is loaded."""

from __future__ import annotations

from verl.config.machine import sampler_sizes, vision
from verl.config.rules import quantized_rollouts
from verl.config.rules.checks import (
    Problems,
    bad_model_folder,
    collect,
    in_range,
    known_name,
    missing_files,
    missing_folder,
)
from verl.config.rules.ranges import engine_choices, engine_limits
from verl.config.schema.generation import GenerationConfig
from verl.config.schema.node import unrecorded
from verl.errors import ConfigError
from verl.registry import SAMPLERS


def validate_generation(cfg: GenerationConfig) -> None:
    """All problems in one `ConfigError`."""
    with unrecorded():
        collect((_names, _numbers, _files), cfg)


def _names(cfg: GenerationConfig) -> Problems:
    problems = known_name(SAMPLERS, "rollout.name", cfg.rollout.name, "Set rollout.name=hf.")
    if cfg.rollout.name == "server" and not cfg.rollout.server.url:
        fix = "Set rollout.server.url=http://host:port."
        problems.append(ConfigError("needs the address of a server", key="rollout.name", got="server", fix=fix))
    return problems


def _numbers(cfg: GenerationConfig) -> Problems:
    problems = sampler_sizes.sizes("rollout", cfg.rollout)
    if not problems:
        problems += sampler_sizes.on_machine("rollout", cfg.rollout, cfg.trainer.device)
    problems += in_range("data.n_samples", cfg.data.n_samples, "1 to 100000", 1 <= cfg.data.n_samples <= 100_000)
    problems += in_range("data.batch_size", cfg.data.batch_size, "1 or more", cfg.data.batch_size >= 1)
    for name in ("prompt_length", "response_length"):
        problems += in_range(f"rollout.{name}", cfg.rollout[name], "1 or more", cfg.rollout[name] >= 1)
    problems += engine_limits("rollout", cfg.rollout) + engine_choices("rollout", cfg.rollout)
    problems += quantized_rollouts.of_sampler("rollout", cfg.rollout)
    problems += in_range("rollout.top_k", cfg.rollout.top_k, "-1 for all tokens, or 1 or more", cfg.rollout.top_k >= -1)
    penalty = cfg.rollout.repetition_penalty
    problems += in_range("rollout.repetition_penalty", penalty, "above 0", penalty > 0)
    problems += in_range("rollout.temperature", cfg.rollout.temperature, "0 or more", cfg.rollout.temperature >= 0)
    return problems + in_range("rollout.top_p", cfg.rollout.top_p, "above 0, at most 1", 0 < cfg.rollout.top_p <= 1)


def _files(cfg: GenerationConfig) -> Problems:
    problems = missing_files("data.path", cfg.data.path) + bad_model_folder("model.path", cfg.model.path)
    problems += vision.problems("model.path", cfg.model.path, cfg.model.external_lib)
    if not cfg.data.output_path.endswith(".parquet"):
        fix = "End its name in .parquet."
        problems.append(ConfigError("is written as parquet", key="data.output_path", got=cfg.data.output_path, fix=fix))
    folder = cfg.data.output_path.rpartition("/")[0]
    return problems if not folder or "://" in folder else problems + missing_folder("data.output_path", folder)
