"""Which formats of weights (``rollout.quantization``) which sampler has, and what their check needs."""

from __future__ import annotations

from typing import Any

from verl.config.rules import sampled_log_probs
from verl.config.rules.checks import Problems
from verl.config.schema.bounds import in_range
from verl.config.schema.root import PPOTrainerConfig
from verl.errors import ConfigError

FORMATS = {"hf": ("fp8", "int8"), "vllm": ("fp8", "torchao"), "sglang": ("fp8",)}
"""vLLM rounds to int8 by torchao."""
INSTEAD = {
    ("vllm", "int8"): "Set quantization=torchao, and quantization_config_file to a file with its Int8WeightOnlyConfig.",
    ("hf", "torchao"): "It rounds by itself: set quantization=int8 or fp8.",
}


def problems(cfg: PPOTrainerConfig) -> Problems:
    """Of the sampler of a run."""
    rollout, key = cfg.actor_rollout_ref.rollout, "actor_rollout_ref.rollout"
    if rollout.quantization is None:
        return of_sampler(key, rollout)
    tolerance = f"{key}.quantization_tolerance"
    number = rollout.quantization_tolerance
    return [
        *of_sampler(key, rollout),
        *in_range(tolerance, number, "above 0", number > 0),
        *sampled_log_probs.problems(cfg, tolerance),
    ]


def of_sampler(key: str, rollout: Any) -> Problems:
    """Of a section with a sampler, in whatever program."""
    kind, file = rollout.quantization, rollout.quantization_config_file
    refused: Problems = []
    formats = FORMATS.get(rollout.name, ())
    if kind is not None and formats and kind not in formats:
        fix = INSTEAD.get((rollout.name, kind), "")
        message = f"the sampler {rollout.name} has no such format"
        refused.append(ConfigError(message, key=f"{key}.quantization", got=kind, allowed=formats, fix=fix))
    if (kind == "torchao") != (file is not None):
        message = "torchao's configuration comes in a file, and no other format has one"
        fix = "Give both, or neither."
        refused.append(ConfigError(message, key=f"{key}.quantization_config_file", got=file, fix=fix))
    return refused
