"""Is this folder a model? Checked before transformers loads it, whose error is about repository ids."""

from __future__ import annotations

import contextlib
import math
import re
import shlex
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from typing import Any

from verl import env
from verl.errors import ModelError
from verl.json_text import read_json
from verl.metrics import notice

WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
CONVERTED = "megatron.json"
"""In a folder whose weights are Megatron-Core's (`megatron_folder`)."""
INDEX_FILES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
ADAPTER = "adapter_config.json"
_HUB_ID = re.compile(r"^[\w.-]+(/[\w.-]+)?$")


def resolve_model(path: str | Path) -> str:
    """The path with ``~`` and variables expanded if it is a folder, else a hub id as it stands.

    Raises:
        ModelError: there is no such folder and the text cannot be a hub id either, or the path is a file.
    """
    expanded = Path(env.expand(str(path)))
    if expanded.is_dir():
        return str(expanded)
    if expanded.exists():
        fix = f"Try {str(expanded.parent)!r}."
        if expanded.suffix == ".gguf":
            folder = shlex.quote(str(expanded.with_suffix("")))
            fix = f"python -m verl.model_merger merge --local_dir {shlex.quote(str(expanded))} --target_dir {folder}"
        raise ModelError("this is a file, a model is a folder", got=str(path), fix=fix)
    if _HUB_ID.match(str(path)) and not str(path).startswith("."):
        return str(path)
    raise ModelError(
        "there is no such folder",
        got=str(path),
        fix="Give a folder in Hugging Face format, or to a hub id such as 'Qwen/Qwen2.5-0.5B'.",
    )


def check_model_folder(path: str, weights: bool = True) -> None:
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
    if weights:
        _check_files(folder)


def _check_files(folder: Path) -> None:
    if (folder / ADAPTER).is_file():
        raise ModelError(
            f"this folder holds the weights of a model and a LoRA adapter ({ADAPTER})",
            got=str(folder),
            fix="Move the adapter into a folder of its own, which lora_adapter_path of the model names, or delete it.",
        )
    read = weight_files(folder)
    for file in read:
        with opened_weights(file):
            pass
    rest = sorted(file.name for file in folder.glob("model*.safetensors") if read and file not in read)
    if rest:
        notice(f"model {folder}", f"{', '.join(rest)} is not read: {read[0].name} and its index do not name it")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that hold a folder's weights, as transformers chooses them.

    That is ``model.safetensors``, else what the index names; another file of the folder may hold weights of the same
    names and is not read. None where the folder has neither.

    Raises:
        ModelError: the index cannot be read, or names something else than files of the folder.
    """
    if (folder / WEIGHT_FILES[0]).is_file():
        return [folder / WEIGHT_FILES[0]]
    if not (folder / INDEX_FILES[0]).is_file():
        return []
    problem = _problem_of_index(folder, INDEX_FILES[0])
    if problem:
        raise ModelError(f"this folder is not a model in Hugging Face format: {problem}", got=str(folder))
    return [folder / name for name in sorted(set(_read_json(folder / INDEX_FILES[0])["weight_map"].values()))]


def num_weights(path: str) -> int:
    """The weights in a local folder's safetensors files, counted in their headers; 0 where it has none."""
    count = 0
    for file in weight_files(Path(path)):
        with opened_weights(file) as opened:
            count += sum(math.prod(opened.get_slice(name).get_shape()) for name in opened.keys())
    return count


@contextlib.contextmanager
def opened_weights(file: Path) -> Iterator[Any]:
    """A safetensors file, open for reading; nothing of it is in memory.

    Raises:
        ModelError: it is cut off or damaged.
    """
    from safetensors import SafetensorError, safe_open  # imported here: it loads torch

    try:
        opened = safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise damaged(file, error) from error
    with opened:
        yield opened


def damaged(file: Path, error: Exception) -> ModelError:
    """What to say of a file of weights that cannot be read."""
    return ModelError(
        f"this file of weights is cut off or damaged: {error}",
        got=str(file),
        fix="Copy or download it again; its size there and here must be the same.",
    )


def refuse_twice(seen: Container[str], names: Iterable[str], folder: Path) -> None:
    """Raise a `ModelError` at a weight that an earlier file of the folder holds, too."""
    twice = next((name for name in names if name in seen), None)
    if twice is not None:
        raise ModelError(
            f"two files of this folder hold the weight {twice}",
            got=str(folder),
            fix="Move the one that does not belong to the model out of the folder.",
        )


def _missing_config(folder: Path) -> str:
    if not (folder / "config.json").is_file():
        return "it has no config.json"
    config = _read_json(folder / "config.json")
    if not isinstance(config, dict) or "model_type" not in config:
        return "its config.json names no model_type"
    return ""


def _missing_weights(folder: Path) -> str:
    index = next((name for name in INDEX_FILES if (folder / name).is_file()), None)
    if index is not None:
        return _problem_of_index(folder, index)
    if any((folder / name).is_file() for name in (*WEIGHT_FILES, CONVERTED)):
        return ""
    return f"it has a config.json but no weights ({' or '.join(WEIGHT_FILES)}, or an index of shards)"


def _problem_of_index(folder: Path, name: str) -> str:
    index = _read_json(folder / name)
    named = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(named, dict) or not named or not all(isinstance(shard, str) for shard in named.values()):
        return f"its {name} cannot be read"
    shards = sorted(set(named.values()))
    outside = [shard for shard in shards if Path(shard).name != shard]
    if outside:
        return f"its {name} names {outside[0]!r}, which is no file of the folder itself"
    absent = [shard for shard in shards if not (folder / shard).is_file()]
    return f"{name} names shards that are not there: {', '.join(absent)}" if absent else ""


def _hint(folder: Path) -> str:
    inner = [p.parent for p in sorted(folder.glob("*/config.json")) + sorted(folder.glob("*/*/config.json"))]
    if (folder / ADAPTER).is_file():
        return "It holds a LoRA adapter: name its base model, and this folder as lora_adapter_path beside it."
    if inner:
        return f"Did you mean {str(inner[0])!r}?"
    return "A complete folder holds config.json, model.safetensors and the tokenizer's files."


def _read_json(path: Path) -> Any:
    try:
        return read_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # the caller says that the file is unusable
