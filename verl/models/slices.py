"""Parts of the weights of a Hugging Face folder, read from its files without reading the rest."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl.errors import ModelError, suggest
from verl.models import folder as model_folder
from verl.models import megatron_folder


class SlicedFolder:
    """The weights of a folder by their Hugging Face names, also where they lie there as Megatron-Core's.

    Raises:
        ModelError: the folder holds no safetensors files, a damaged one, or a weight twice.
    """

    def __init__(self, path: str | Path, files: dict[str, Any]):
        self.path, self._files = str(path), files

    @classmethod
    @contextlib.contextmanager
    def opened(cls, path: str | Path) -> Iterator[SlicedFolder]:
        """Within the block the folder's files are open; nothing of them is in memory."""
        folder = Path(model_folder.resolve_model(path))
        converted = (folder / model_folder.CONVERTED).is_file()
        names = sorted(folder.glob(megatron_folder.FILES)) if converted else model_folder.weight_files(folder)
        if not names:
            raise ModelError(
                "this folder holds no safetensors files, and only those can be read in parts",
                got=str(path),
                fix="Write them with transformers: model.save_pretrained(folder).",
            )
        with contextlib.ExitStack() as stack:
            files: dict[str, Any] = {}
            for name in names:
                file = stack.enter_context(model_folder.opened_weights(name))
                model_folder.refuse_twice(files, file.keys(), folder)
                files.update(dict.fromkeys(file.keys(), file))
            if converted:
                fused = megatron_folder.FusedFile(folder, files)
                files = dict.fromkeys(fused.keys(), fused)
            yield cls(path, files)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def names(self) -> Iterator[str]:
        """Of all weights."""
        return iter(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a full weight."""
        return tuple(self._of(name).get_slice(name).get_shape())

    def read(self, name: str, axis: int, low: int, high: int) -> Tensor:
        """``low`` to ``high`` along one axis, in memory of its own.

        Raises:
            ModelError: the folder has no such weight.
        """
        cut = [slice(None)] * axis + [slice(low, high)]
        return torch.as_tensor(self._of(name).get_slice(name)[tuple(cut)]).clone()

    def box(self, name: str, bounds: Sequence[tuple[int, int]]) -> Tensor:
        """``low`` to ``high`` along every axis, in the memory of the file: to be copied before it is closed.

        Raises:
            ModelError: the folder has no such weight.
        """
        return torch.as_tensor(self._of(name).get_slice(name)[tuple(slice(low, high) for low, high in bounds)])

    def whole(self, name: str) -> Tensor:
        """A full weight, in memory of its own."""
        return self.read(name, 0, 0, self.shape(name)[0])

    def _of(self, name: str) -> Any:
        if name not in self._files:
            raise ModelError(f"the weight {name} is missing", got=self.path, fix=suggest(name, self._files))
        return self._files[name]
