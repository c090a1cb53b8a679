"""A GGUF file, as llama.cpp reads it, as a Hugging Face folder: what trains here are floats.

transformers knows how each architecture names its weights, and ``gguf`` the blocks of each quantization. Both read
numbers and text alone; a template of the file is rendered in the same sandbox as any other.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import is_gguf_available

from verl.errors import MissingDependencyError, ModelError
from verl.models import hf_folder
from verl.models.config import quiet_transformers, readable_errors
from verl.models.weights import export_weights

ENDING = ".gguf"
BYTES = 4  # of a weight in float32
MOMENT = 1.25
"""Memory while a file is read, as a multiple of its weights in float32."""


def write_folder(file: Path, target: Path) -> Path:
    """Write the model of a GGUF file to a folder in Hugging Face format, dequantized to float32.

    The values are those of the quantized file: what its rounding lost stays lost.

    Args:
        file: one file; a model that was split into several has to be joined first (``llama-gguf-split --merge``).
        target: created.

    Returns:
        The target.

    Raises:
        MissingDependencyError: ``gguf`` is not installed.
        ModelError: no GGUF file, a damaged one, an architecture that transformers cannot read, or less memory or disk
            than its weights take.
    """
    if not is_gguf_available():
        raise MissingDependencyError(
            "reading a GGUF file needs gguf", got=str(file), fix="In the checkout: pip install -e '.[gguf]'"
        )
    _check(file, target)
    with quiet_transformers(), readable_errors(str(file)):
        tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        model: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    config = model.config
    config.__dict__.pop("quantization_config", None)  # its weights are floats now
    return hf_folder.save_hf_folder(
        target,
        config=config,
        weights=export_weights(model),
        tokenizer=tokenizer,
        generation_config=model.generation_config,
        architecture=type(model).__name__,
    )


def _check(file: Path, target: Path) -> None:
    """Refuse, before a weight is read, what cannot be written."""
    from gguf import GGUFReader
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    try:
        reader = GGUFReader(file)
        field = reader.get_field("general.architecture")
        architecture = str(field.contents()) if field is not None else "none"
        parts = reader.get_field("split.count")
        count = int(parts.contents()) if parts is not None else 1
        weights = sum(int(tensor.n_elements) for tensor in reader.tensors)
    except (ValueError, IndexError, KeyError, OverflowError, MemoryError, OSError) as error:
        message = f"this is no complete GGUF file: {error}"
        raise ModelError(message, got=str(file), fix="Download it again, and compare its size.") from error
    supported = sorted(set(GGUF_SUPPORTED_ARCHITECTURES) - {"general", "tokenizer"})
    if architecture not in supported:
        message = f"transformers cannot read the GGUF files of the architecture {architecture!r}"
        raise ModelError(message, got=str(file), allowed=supported, fix="Give the model in Hugging Face format.")
    if count > 1:
        fix = f"llama-gguf-split --merge {file} {file.with_name('joined.gguf')}"
        raise ModelError(f"this is one of {count} files that hold the model together", got=str(file), fix=fix)
    room = target if target.exists() else next(folder for folder in target.absolute().parents if folder.exists())
    for what, needed, there in (
        ("memory", int(MOMENT * BYTES * weights), psutil.virtual_memory().available),
        ("disk", BYTES * weights, shutil.disk_usage(room).free),
    ):
        if needed > there:
            message = (
                f"its {weights:,} weights take {needed / 1e9:.1f} GB of {what} in float32, {there / 1e9:.1f} are free"
            )
            raise ModelError(message, got=str(file))
