"""A Hugging Face folder as a folder of Megatron-Core's weights, layer by layer.

Several processes share the layers; none ever holds more than the weights of one file.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from verl import env
from verl.distributed import Ranks
from verl.errors import ModelError, suggest
from verl.metrics import notice
from verl.models import folder as model_folder
from verl.models.config import load_model_config
from verl.models.megatron import (
    EMBEDDING,
    FINAL_NORM,
    OUTPUT,
    VALUE_HEAD,
    Family,
    Slot,
    filled,
    fused,
    megatron_family,
    slots_of,
)
from verl.models.megatron_folder import FILES, FolderPlace, Heads, write_manifest
from verl.models.slices import SlicedFolder

MAX_FILE_BYTES = 1 << 30
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pth", "*.pt")


def convert_to_megatron(
    source: str | Path, target: str | Path, *, trust_remote_code: bool = False, ranks: Ranks | None = None
) -> Path:
    """Write ``source`` with Megatron-Core's weights.

    Args:
        source: a Hugging Face folder with safetensors.
        target: created; it gets the configuration and the tokenizer too.
        ranks: the processes that share the work, all of which call this.

    Returns:
        The target.

    Raises:
        ModelError: a family without a table, a weight that it does not know, or a target that holds weights.
    """
    ranks, target = ranks or Ranks(), Path(env.expand(str(target)))
    config = load_model_config(str(source), trust_remote_code=trust_remote_code).get_text_config()
    family = megatron_family(config)
    settings = family.settings(config)
    ranks.only_first(lambda: _prepare(Path(model_folder.resolve_model(source)), target))
    with SlicedFolder.opened(source) as weights:
        tied = bool(config.tie_word_embeddings)
        slots = list(_slots(family, settings, weights, tied))
        _check_all_known(weights, slots, settings["num_layers"], tied)
        mine = ((slot, layer) for slot, layer in slots if layer % ranks.size == ranks.rank)
        ranks.together(lambda: _write(target, ranks.rank, _converted(weights, mine, settings)))
        places = {
            name: FolderPlace(slot.ours, slot.form, part) for slot, _ in slots for part, name in enumerate(slot.theirs)
        }
    ranks.only_first(lambda: write_manifest(target, Heads.of(settings), places))
    return target


def differences(source: str | Path, target: str | Path, ranks: Ranks | None = None) -> list[str]:
    """Weights whose bits differ, or that only one of two folders has; several processes share the work."""
    ranks = ranks or Ranks()

    def compare() -> tuple[None, list[str]]:
        with SlicedFolder.opened(source) as ours, SlicedFolder.opened(target) as theirs:
            names = sorted(set(ours.names()) | set(theirs.names()))
            return None, [n for n in names[ranks.rank :: ranks.size] if not _same(n, ours, theirs)]

    return sorted(name for answer in ranks.together(compare)[1] for name in answer)


def _same(name: str, ours: SlicedFolder, theirs: SlicedFolder) -> bool:
    if name not in ours or name not in theirs or ours.shape(name) != theirs.shape(name):
        return False
    a, b = ours.whole(name), theirs.whole(name)
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def _prepare(source: Path, target: Path) -> None:
    if target.is_dir() and any(path for pattern in (FILES, "model*.safetensors") for path in target.glob(pattern)):
        raise ModelError("this folder holds weights already", got=str(target), fix="Name another one, or delete it.")
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file() and not any(file.match(pattern) for pattern in _WEIGHTS):
            shutil.copy2(file, target / file.name)


def _slots(family: Family, settings: Any, weights: SlicedFolder, tied: bool) -> Iterator[tuple[Slot, int]]:
    """Slots under their final names, each with a number that says which process converts it."""
    ends = [EMBEDDING, FINAL_NORM, *([] if tied else [OUTPUT]), *VALUE_HEAD]
    for slot in ends:
        if slot.theirs[0] in weights or slot in (EMBEDDING, FINAL_NORM):
            yield slot, 0
    for slot, layers in slots_of(family, settings):
        experts = int(settings["num_moe_experts"]) if "{expert}" in slot.ours else 1
        for layer in layers:
            for expert in range(experts):
                final = filled(slot, layer, expert)
                if final.theirs[0] in weights or not slot.optional:
                    yield final, layer


def _check_all_known(weights: SlicedFolder, slots: Iterable[tuple[Slot, int]], num_layers: int, tied: bool) -> None:
    expected = {name for slot, _ in slots for name in slot.theirs} | ({"lm_head.weight"} if tied else set())
    unknown = sorted(set(weights.names()) - expected)
    ahead = [name for name in unknown if (match := _LAYER.match(name)) and int(match[1]) >= num_layers]
    if ahead:
        notice(weights.path, f"{len(ahead)} weights of layers that predict further tokens are left out: {ahead[0]}")
    unknown = sorted(set(unknown) - set(ahead))
    if unknown:
        raise ModelError(
            f"the table of Megatron-Core weights does not know {unknown[0]} of this model",
            got=weights.path,
            fix=suggest(unknown[0], expected),
        )


def _converted(weights: SlicedFolder, slots: Iterable[tuple[Slot, int]], settings: Any) -> Iterator[tuple[str, Tensor]]:
    for slot, _ in slots:
        yield slot.ours, fused(slot.form, [weights.whole(name) for name in slot.theirs], settings["num_query_groups"])


def _write(target: Path, rank: int, tensors: Iterable[tuple[str, Tensor]]) -> tuple[None, None]:
    waiting: dict[str, Tensor] = {}
    number, size = 0, 0
    for name, tensor in tensors:
        if waiting and size + tensor.nbytes > MAX_FILE_BYTES:
            save_file(waiting, target / f"megatron-{rank:05}-{number:05}.safetensors", metadata={"format": "pt"})
            waiting, size, number = {}, 0, number + 1
        waiting[name] = tensor.contiguous()
        size += tensor.nbytes
    save_file(waiting, target / f"megatron-{rank:05}-{number:05}.safetensors", metadata={"format": "pt"})
    return None, None
