"""New weights for a server on the same file system: one Hugging Face folder per version, complete once announced."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file

from verl.errors import RolloutError
from verl.outcomes import on_error
from verl.weight_sync import WeightChunk

SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
INDEX = "model.safetensors.index.json"


def version_of(root: Path, version: int) -> Path:
    """The folder of a version, as both sides name it."""
    return root / f"version-{version}"


class WeightFolder:
    """Writes versions below one folder and keeps the last of them, which the server may read again when it restarts.

    Args:
        root: a folder that the server sees under the same path.
        model: the model's folder, whose configuration and tokenizer files go along.
    """

    def __init__(self, root: str | Path, model: str | Path):
        self.root, self.model = Path(root).absolute(), Path(model)

    def write(self, chunks: Iterable[WeightChunk], version: int) -> Path:
        """The folder of a version; an interrupted stream leaves none behind."""
        partial = self.root / f"version-{version}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir(parents=True)
        except OSError as error:
            raise RolloutError(
                f"the folder for weights cannot be written: {error}",
                key="actor_rollout_ref.rollout.server.weights_dir",
                got=str(self.root),
            ) from error
        with on_error(lambda _: shutil.rmtree(partial, ignore_errors=True)):
            self._fill(partial, chunks)
        folder = version_of(self.root, version)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
        return folder

    def keep_only(self, version: int) -> None:
        """Delete every other version."""
        for folder in self.root.glob("version-*"):
            if folder.name != f"version-{version}":
                shutil.rmtree(folder, ignore_errors=True)

    def _fill(self, folder: Path, chunks: Iterable[WeightChunk]) -> None:
        for pattern in SMALL_FILES:
            for file in self.model.glob(pattern):
                if file.name != INDEX:
                    shutil.copyfile(file, folder / file.name)
        places: dict[str, str] = {}
        total = 0
        for number, chunk in enumerate(chunks):
            name = f"model-{number:05d}.safetensors"
            tensors = {
                key: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for key, tensor in chunk.tensors
            }
            save_file(tensors, str(folder / name), metadata={"format": "pt"})
            places.update(dict.fromkeys(tensors, name))
            total += chunk.num_bytes
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
