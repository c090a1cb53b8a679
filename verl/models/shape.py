"""Sizes of a model from its config.json with transformers' defaults, for the planner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from verl.config.machine.config_json import config_json
from verl.errors import ModelError
from verl.json_text import JsonObject
from verl.models.config import quiet_transformers, readable_errors
from verl.models.vision import family_of, tower_modules
from verl.planner.shapes import ModelShape


def model_shape(path: str, key: str) -> ModelShape:
    """Sizes of a model, whose weights are not read.

    Args:
        path: a folder with a config.json, or a hub name whose files are on this machine.
        key: the setting that names it.

    Raises:
        ModelError: there is no config.json, transformers refuses it, or the planner has no layout of its family.
    """
    fields = config_json(path)
    if not fields:
        fix = f"Name a folder with a config.json, or fetch the model: hf download {path}"
        raise ModelError("there is no config.json on this machine", key=key, got=path, fix=fix)
    if fields.get("model_type") not in CONFIG_MAPPING:
        return ModelShape.from_config(fields)
    with quiet_transformers(), readable_errors(path):
        config = AutoConfig.for_model(**fields)
    return ModelShape.from_config(config.to_dict(), _vision(config))


def write_random_model(fields: JsonObject, folder: Path) -> None:
    """A folder with a causal language model of random weights (seed 0), for measurements.

    Args:
        fields: of its config.json, ``model_type`` among them.
    """
    with torch.random.fork_rng(devices=[]), quiet_transformers():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields)).save_pretrained(folder)


def _vision(config: Any) -> int:
    """Parameters of the tower and its projector, counted on a model without values."""
    family = family_of(config)
    if family is None:
        return 0
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    return sum(weight.numel() for _, part in tower_modules(model, family) for weight in part.parameters())
