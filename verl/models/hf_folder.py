"""A model folder in Hugging Face format, written from an iterator of weights.

The weights come as (name, tensor) pairs, so that a sharded engine can gather one tensor at a time; what is written
loads with ``from_pretrained`` and needs no merge step.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from transformers.utils import cached_file

from verl.errors import ModelError
from verl.models import folder as model_folder
from verl.models.config import quiet_transformers
from verl.protocol.tensor_file import read_tensor_file
from verl.protocol.tokenizer import Tokenizer

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig

MAX_SHARD_BYTES = 5 << 30
ShardWriter = Callable[[Path, dict[str, torch.Tensor]], object]
"""Writes tensors into one safetensors file."""
_CODE = "*.py"  # modelling code of a remote-code model
_PROCESSOR = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""How the processor of a model that sees is configured; training changes nothing of it."""


def _save_file(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, path, metadata={"format": "pt"})


def save_hf_folder(
    target: str | Path,
    *,
    config: PretrainedConfig,
    weights: Iterable[tuple[str, torch.Tensor]] | None,
    tokenizer: Tokenizer | None = None,
    generation_config: GenerationConfig | None = None,
    architecture: str | None = None,
    source: str | Path | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    write_shard: ShardWriter = _save_file,
) -> Path:
    """Write config, weights (safetensors), tokenizer and generation config.

    Args:
        config: the model's ``PretrainedConfig``; it is not changed.
        weights: (Hugging Face name, tensor on any device) pairs; None writes everything but the weights.
        architecture: class name for ``config.json``, so that ``AutoModelFor...`` finds it.
        source: folder or hub name the model came from; its modelling code and the files of its processor are copied
            where there are any.
        max_shard_bytes: a file grows no larger, except for a single tensor.
        write_shard: called for one file after the other, in the order of their final names.

    Returns:
        The folder.

    Raises:
        OSError: the folder cannot be written.
    """
    target = Path(target)
    target.mkdir(parents=True, exist_ok=True)
    dtype = _write_weights(target, weights, max_shard_bytes, write_shard) if weights is not None else None
    written = copy.deepcopy(config)
    if architecture is not None:
        written.architectures = [architecture]
    if dtype is not None:
        written.dtype = dtype
    with quiet_transformers():
        written.save_pretrained(target)
        if generation_config is not None:
            generation_config.save_pretrained(target)
        if tokenizer is not None:
            tokenizer.save_pretrained(target)
    if source is not None and Path(source).is_dir():
        for code in Path(source).glob(_CODE):
            shutil.copy2(code, target / code.name)
    if source is not None and hasattr(config, "vision_config"):
        _copy_processor(str(source), target)
    return target


def _copy_processor(source: str, target: Path) -> None:
    for name in _PROCESSOR:
        file = cached_file(
            source, name, local_files_only=True, _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )  # fmt: skip
        if file is not None and Path(file).parent.resolve() != target.resolve():
            shutil.copyfile(file, target / name)


def read_weights(path: str | Path) -> dict[str, torch.Tensor]:
    """All weights of a folder that holds safetensors, on the CPU.

    Raises:
        ModelError: the folder holds no safetensors files, or they cannot be read.
    """
    folder = Path(model_folder.resolve_model(path))
    files = model_folder.weight_files(folder)
    if not files:
        raise ModelError("this folder holds no safetensors files", got=str(path))
    weights: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            tensors = read_tensor_file(file)
        except (OSError, ValueError) as error:
            raise model_folder.damaged(file, error) from error
        model_folder.refuse_twice(weights, tensors, folder)
        weights |= tensors
    return weights


def _write_weights(
    target: Path, weights: Iterable[tuple[str, torch.Tensor]], max_shard_bytes: int, write_shard: ShardWriter
) -> torch.dtype | None:
    """Write shards as they fill up; the names carry the number of shards, so they are given at the end."""
    shard: dict[str, torch.Tensor] = {}
    names: list[list[str]] = []
    size = total = 0
    dtype: torch.dtype | None = None
    for name, tensor in weights:
        if shard and size + tensor.nbytes > max_shard_bytes:
            write_shard(_shard_path(target, len(names)), shard)
            names.append(list(shard))
            shard, size = {}, 0
        shard[name] = tensor.detach().to("cpu").contiguous()
        size += tensor.nbytes
        total += tensor.nbytes
        dtype = dtype or (tensor.dtype if tensor.is_floating_point() else None)
    write_shard(_shard_path(target, len(names)), shard)
    names.append(list(shard))
    _name_shards(target, names, total)
    return dtype


def _shard_path(target: Path, number: int) -> Path:
    return target / f"shard-{number}.safetensors"


def _name_shards(target: Path, names: list[list[str]], total: int) -> None:
    for stale in [*target.glob("model*.safetensors"), *target.glob("model*.safetensors.index.json")]:
        stale.unlink()  # of an earlier save with another number of shards: loaders would prefer it
    if len(names) == 1:
        _shard_path(target, 0).rename(target / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for number, members in enumerate(names):
        file = f"model-{number + 1:05d}-of-{len(names):05d}.safetensors"
        _shard_path(target, number).rename(target / file)
        weight_map.update(dict.fromkeys(members, file))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
