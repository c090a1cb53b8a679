"""A checkpoint of a training run as one Hugging Face folder: our own, and shards that upstream's FSDP wrote.

A folder of Megatron-Core's weights that the converter wrote becomes one too.

Our checkpoints hold full weights already, so they are copied, or an adapter is merged into its base. Upstream's shards
are torch pickles of distributed tensors; they are read with ``weights_only`` and torch's own list of allowed classes,
so that a file can hold tensors and nothing else.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from verl import env
from verl.errors import ModelError
from verl.json_text import read_json
from verl.models import folder as model_folder
from verl.models import gguf, hf_folder, lora, nf4
from verl.models.config import load_model_config, quiet_transformers
from verl.models.loading import load_causal_lm
from verl.models.slices import SlicedFolder
from verl.models.weights import export_weights

SHARD = re.compile(r"model_world_size_([1-9]\d*)_rank_(0|[1-9]\d*)\.pt", re.ASCII)
FOREIGN = ("dist_ckpt", "model/dist_ckpt")
"""Where upstream puts Megatron-Core's distributed checkpoints: of old, and since 0.9."""
LORA_META = "lora_train_meta.json"
ADAPTER_FOLDER = "lora_adapter"
TOLERANCE = 1e-6


def merge(source: str | Path, target: str | Path, trust_remote_code: bool = False) -> Path:
    """Write the model of a checkpoint's role folder (``global_step_7/actor``) as a Hugging Face folder.

    Args:
        source: a role folder of ours, one with ``model_world_size_*_rank_*.pt`` and ``huggingface/``, a folder of
            Megatron-Core's weights (`megatron_conversion`), or a GGUF file.
        target: created; an adapter is merged into its base, and upstream's also written to ``lora_adapter/``.

    Returns:
        The target.

    Raises:
        ModelError: no such checkpoint, shards that are missing or hold anything but tensors, or Megatron-Core's own.
    """
    folder, target = Path(env.expand(str(source))), Path(env.expand(str(target)))
    if folder.suffix == gguf.ENDING and folder.is_file():
        return gguf.write_folder(folder, target)
    inner = next((f for f in (folder / "huggingface", folder / "model" / "huggingface") if f.is_dir()), folder)
    if not folder.is_dir():
        raise ModelError("there is no such folder", got=str(source))
    if any(SHARD.fullmatch(file.name) for file in folder.iterdir()):
        return _write(target, inner, merge_shards(folder), trust_remote_code)
    if (folder / model_folder.CONVERTED).is_file():
        return _from_converted(folder, target, trust_remote_code)
    if (inner / lora.WEIGHTS_FILE).is_file():
        return _merge_adapter(inner, target, trust_remote_code)
    if model_folder.weight_files(inner):
        return _write(target, inner, hf_folder.read_weights(inner), trust_remote_code)
    if any((folder / name).is_dir() for name in FOREIGN):
        raise ModelError(
            "this checkpoint is Megatron's own, whose index is a pickle: it could run any code, so it is not loaded",
            got=str(source),
            fix="Where it was written, save its Hugging Face weights: save_contents=[model,hf_model], or "
            "upstream's merger with --backend megatron. That folder is a model here.",
        )
    roles = sorted(f"{path.parent.name}" for path in folder.glob("*/huggingface"))
    hint = f"Name one of its roles: {', '.join(roles)}." if roles else "Give the role's folder: global_step_N/actor."
    raise ModelError("this folder holds no weights of a model", got=str(source), fix=hint)


def compare_folders(merged: str | Path, expected: str | Path) -> list[str]:
    """What differs between two Hugging Face folders, one line each; nothing where they hold the same model."""
    ours, theirs = hf_folder.read_weights(merged), hf_folder.read_weights(expected)
    differences = [f"{name}: only in {where}" for where, names in (
        (merged, set(ours) - set(theirs)), (expected, set(theirs) - set(ours))) for name in sorted(names)]  # fmt: skip
    for name in sorted(set(ours) & set(theirs)):
        a, b = ours[name], theirs[name]
        if a.shape != b.shape:
            differences.append(f"{name}: shape {tuple(a.shape)} and {tuple(b.shape)}")
        elif not torch.allclose(a.float(), b.float(), atol=TOLERANCE, rtol=0):
            differences.append(f"{name}: differs by up to {(a.float() - b.float()).abs().max().item():.3g}")
    return differences


def merge_shards(folder: Path) -> dict[str, Tensor]:
    """Full tensors from the files that every rank of an FSDP run wrote.

    Raises:
        ModelError: a rank's file is missing or damaged, or holds something that is no tensor.
    """
    shards = _read_shards(folder)
    merged: dict[str, Tensor] = {}
    for name in list(shards[0]):
        parts = [shard.pop(name) for shard in shards]
        merged[name] = _joined(name, parts)
    return merged


def _read_shards(folder: Path) -> list[dict[str, Any]]:
    named = [(int(m[1]), int(m[2])) for m in map(SHARD.fullmatch, (file.name for file in folder.iterdir())) if m]
    sizes, ranks = {size for size, _ in named}, sorted(rank for _, rank in named)
    if len(sizes) != 1 or ranks != list(range(len(ranks))) or len(ranks) != max(sizes):
        raise ModelError(
            "the shards of this checkpoint are not complete",
            got=f"ranks {ranks}",
            allowed=f"ranks 0 to {max(sizes) - 1}, written by one run",
        )
    (size,) = sizes
    return [_read_shard(folder / f"model_world_size_{size}_rank_{rank}.pt") for rank in ranks]


def _read_shard(path: Path) -> dict[str, Any]:
    importlib.import_module("torch.distributed.tensor")  # puts its classes on torch's list of allowed ones

    try:
        return dict(torch.load(path, map_location="cpu", weights_only=True))
    except (
        torch.serialization.pickle.UnpicklingError,
        RuntimeError,
        EOFError,
        OSError,
        TypeError,
        ValueError,
    ) as error:
        raise ModelError(
            f"this shard cannot be read as tensors alone: {str(error).splitlines()[0]}",
            got=str(path),
            fix="A pickle that holds more than tensors can run any code, so it is not loaded.",
        ) from error


def _joined(name: str, parts: list[Any]) -> Tensor:
    """One weight from its pieces: cut along one dimension of the mesh, the same on all ranks of the others."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    first = parts[0]
    if not isinstance(first, DTensor):
        return first
    placements, mesh = first.placements, first.device_mesh.mesh
    cut = [number for number, placement in enumerate(placements) if isinstance(placement, Shard)]
    odd = [p for p in placements if not isinstance(p, Shard | Replicate)]
    if odd or len(cut) > 1:
        raise ModelError(f"{name} is laid out in a way that cannot be merged", got=str(placements))
    if not cut:
        return first.to_local()
    (dimension,) = cut
    ranks = mesh.movedim(dimension, 0).reshape(mesh.shape[dimension], -1)[:, 0].tolist()
    placement: Any = placements[dimension]
    joined = torch.cat([parts[rank].to_local() for rank in ranks], dim=placement.dim)
    if joined.shape != first.shape:
        raise ModelError(f"the pieces of {name} do not fit together", got=tuple(joined.shape), allowed=str(first.shape))
    return joined


def _from_converted(folder: Path, target: Path, trust_remote_code: bool) -> Path:
    with quiet_transformers():
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    with SlicedFolder.opened(folder) as weights:
        return hf_folder.save_hf_folder(
            target,
            config=config,
            weights=((name, weights.whole(name)) for name in weights.names()),
            tokenizer=_tokenizer(folder, trust_remote_code),
            generation_config=_generation_config(folder),
            source=folder,
        )


def _write(target: Path, source: Path, weights: Mapping[str, Tensor], trust_remote_code: bool) -> Path:
    with quiet_transformers():
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    named = dict(weights)
    if any(".lora_" in name for name in named):
        named = _without_adapter(target, source.parent, named)
    if config.get_text_config().tie_word_embeddings and "lm_head.weight" in named:
        head = named.pop("lm_head.weight")
        if not any(head.shape == other.shape and torch.equal(head, other) for other in named.values()):
            named["lm_head.weight"] = head  # an adapter trained it, and not the embeddings
            config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
    return hf_folder.save_hf_folder(
        target,
        config=config,
        weights=iter(named.items()),
        tokenizer=_tokenizer(source, trust_remote_code),
        generation_config=_generation_config(source),
        source=source,
    )


def _without_adapter(target: Path, folder: Path, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The base under its own names with the adapter merged in; the adapter itself goes to ``lora_adapter/``."""
    from safetensors.torch import save_file

    meta = read_json((folder / LORA_META).read_text(encoding="utf-8")) if (folder / LORA_META).is_file() else {}
    factors = {name: tensor for name, tensor in weights.items() if ".lora_" in name}
    rank = next(tensor.shape[0] for name, tensor in factors.items() if ".lora_A." in name)
    scale = float(meta.get("lora_alpha", rank)) / rank
    merged = dict(_merged_pairs(weights, scale))
    adapter = {name.replace(f".{lora.NAME}.", "."): tensor.contiguous() for name, tensor in factors.items()}
    (target / ADAPTER_FOLDER).mkdir(parents=True, exist_ok=True)
    save_file(adapter, target / ADAPTER_FOLDER / lora.WEIGHTS_FILE, metadata={"format": "pt"})
    targets = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in factors})
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": scale * rank, "target_modules": targets,
                "task_type": meta.get("task_type", "CAUSAL_LM")}  # fmt: skip
    (target / ADAPTER_FOLDER / lora.CONFIG_FILE).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return merged


def _merged_pairs(weights: Mapping[str, Tensor], scale: float) -> Iterator[tuple[str, Tensor]]:
    left = {name for name in weights if ".lora_" in name or ".modules_to_save." in name}
    for name, tensor in weights.items():
        if ".lora_" in name:
            continue
        owner, base, kind = name.rpartition(".base_layer.")
        factor = f"{owner}.lora_A.{lora.NAME}.weight"
        if base and kind == "weight" and factor in weights:
            second = f"{owner}.lora_B.{lora.NAME}.weight"
            product = weights[second].float() @ weights[factor].float()
            left -= {factor, second}
            tensor = (tensor.float() + scale * product).to(tensor.dtype)
        yield (f"{owner}.{kind}" if base else name).removeprefix(lora.PREFIX), tensor
    if left:
        raise ModelError(
            f"{len(left)} tensors of the adapter are no two factors of a linear layer, the first is {min(left)}",
            fix="Where it was trained, merge it with peft (merge_and_unload) and save the model.",
        )


def _merge_adapter(folder: Path, target: Path, trust_remote_code: bool) -> Path:
    base = read_json((folder / lora.CONFIG_FILE).read_text(encoding="utf-8"))["base_model_name_or_path"]
    stored = load_model_config(base, trust_remote_code=trust_remote_code).dtype
    model: Any = load_causal_lm(base, dtype=stored or torch.float32, trust_remote_code=trust_remote_code)
    lora.add_adapter(model, lora.LoraSettings(rank=0, adapter_path=str(folder)), seed=0)
    if nf4.recorded(folder) is not None:
        nf4.quantize_frozen(model)
    return hf_folder.save_hf_folder(
        target,
        config=model.config,
        weights=export_weights(model),
        tokenizer=_tokenizer(folder, trust_remote_code) or _tokenizer(Path(base), trust_remote_code),
        generation_config=model.generation_config,
        architecture=type(model).__name__,
        source=base,
    )


def _tokenizer(folder: Path, trust_remote_code: bool) -> Any:
    if not (folder / "tokenizer_config.json").is_file():
        return None
    with quiet_transformers():
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)


def _generation_config(folder: Path) -> Any:
    exists = (folder / "generation_config.json").is_file()
    return GenerationConfig.from_pretrained(folder) if exists else None
