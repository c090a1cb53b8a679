"""A LoRA adapter as the files in which vLLM takes it: peft's folder, in shared memory where there is some."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file

from verl.models import lora
from verl.models.lora import LoraSettings
from verl.rollout.vllm.weight_transfer import close_folder, open_folder


@contextmanager
def as_folder(tensors: Mapping[str, torch.Tensor], settings: LoraSettings) -> Iterator[Path]:
    """A folder that is there within the block.

    Args:
        tensors: the factors under their names in peft's files.
    """
    config = lora.config_of(settings)
    config.target_modules = sorted({lora.module_name(name) for name in tensors})
    config.inference_mode = True
    folder = open_folder()
    try:
        save_file(dict(tensors), str(folder / lora.WEIGHTS_FILE))
        config.save_pretrained(str(folder))
        yield folder
    finally:
        close_folder(folder)
