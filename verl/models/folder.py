"""Is this folder a model? Said before transformers is asked, because its own answer is about repository ids."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from verl import env
from verl.errors import ModelError
from verl.json_text import read_json

WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
CONVERTED = "megatron.json"
"""In a folder whose weights are Megatron-Core's (`megatron_folder`)."""
INDEX_FILES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_HUB_ID = re.compile(r"^[\w.-]+(/[\w.-]+)?$")


def resolve(path: str | Path) -> str:
    """The path with ``~`` and variables expanded if it is a folder, else a hub id as it stands.

    Raises:
        ModelError: there is no such folder and the text cannot be a hub id either, or the path is a file.
    """
    expanded = Path(env.expand(str(path)))
    if expanded.is_dir():
        return str(expanded)
    if expanded.exists():
        raise ModelError("this is a file, a model is a folder", got=str(path), fix=f"Try {str(expanded.parent)!r}.")
    if _HUB_ID.match(str(path)) and not str(path).startswith("."):
        return str(path)
    raise ModelError(
        "there is no such folder",
        got=str(path),
        fix="Set model.path to a folder in Hugging Face format, or to a hub id such as 'Qwen/Qwen2.5-0.5B'.",
    )


def check(path: str, weights: bool = True) -> None:
    """Raise a `ModelError` that lists what a local model folder lacks; a hub id passes unseen.

    Args:
        weights: whether weight files are needed, or a configuration is enough.
    """
    folder = Path(path)
    if not folder.is_dir():
        return
    missing = _missing_config(folder)
    if weights and not missing:
        missing = _missing_weights(folder)
    if missing:
        raise ModelError(
            f"this folder is not a model in Hugging Face format: {missing}", got=str(folder), fix=_hint(folder)
        )


def _missing_config(folder: Path) -> str:
    if not (folder / "config.json").is_file():
        return "it has no config.json"
    config = _read_json(folder / "config.json")
    if not isinstance(config, dict) or "model_type" not in config:
        return "its config.json names no model_type"
    return ""


def _missing_weights(folder: Path) -> str:
    for name in INDEX_FILES:
        if not (folder / name).is_file():
            continue
        index = _read_json(folder / name)
        shards = sorted(set(index["weight_map"].values())) if isinstance(index, dict) and "weight_map" in index else []
        absent = [shard for shard in shards if not (folder / shard).is_file()]
        if not shards:
            return f"its {name} cannot be read"
        return f"{name} names shards that are not there: {', '.join(absent)}" if absent else ""
    if any((folder / name).is_file() for name in (*WEIGHT_FILES, CONVERTED)):
        return ""
    return f"it has a config.json but no weights ({' or '.join(WEIGHT_FILES)}, or an index of shards)"


def _hint(folder: Path) -> str:
    inner = [p.parent for p in sorted(folder.glob("*/config.json")) + sorted(folder.glob("*/*/config.json"))]
    if (folder / "adapter_config.json").is_file():
        return "It holds a LoRA adapter: set model.path to its base model and model.lora_adapter_path to this folder."
    if inner:
        return f"Did you mean {str(inner[0])!r}?"
    return "A complete folder holds config.json, model.safetensors and the tokenizer's files."


def _read_json(path: Path) -> Any:
    try:
        return read_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # the caller says that the file is unusable
