"""Rules of batch generation between its settings, checked before the model is loaded."""

from __future__ import annotations

from verl.config.machine import sampler_sizes, vision
from verl.config.rules import quantized_rollouts
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
from verl.config.schema.generation import GenerationConfig
from verl.config.schema.node import unrecorded
from verl.errors import ConfigError
from verl.registry import SAMPLERS


def validate_generation(cfg: GenerationConfig) -> None:
    """All problems in one `ConfigError`."""
    with unrecorded():
        collect((_names, out_of_bounds, judged(TABLE), _numbers, _files), cfg)


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
    return problems + quantized_rollouts.of_sampler("rollout", cfg.rollout)


def _files(cfg: GenerationConfig) -> Problems:
    problems = missing_files("data.path", cfg.data.path) + bad_model_folder("model.path", cfg.model.path)
    problems += vision.problems("model.path", cfg.model.path, cfg.model.external_lib)
    if not cfg.data.output_path.endswith(".parquet"):
        fix = "End its name in .parquet."
        problems.append(ConfigError("is written as parquet", key="data.output_path", got=cfg.data.output_path, fix=fix))
    folder = cfg.data.output_path.rpartition("/")[0]
    return problems if not folder or "://" in folder else problems + missing_folder("data.output_path", folder)
