"""What a run saved, as Hugging Face's own model: nothing of this library is in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, PreTrainedModel

from verl.errors import MissingDependencyError

__all__ = ["PreTrainedModel", "load_trained"]


def load_trained(folder: str | Path, **arguments: Any) -> PreTrainedModel:
    """The model of a folder in Hugging Face's form; an adapter comes with its base, from where it was trained.

    Args:
        arguments: of ``from_pretrained``.

    Raises:
        MissingDependencyError: an adapter needs peft.
    """
    if (Path(folder) / "adapter_config.json").is_file():
        try:
            from peft import AutoPeftModel
        except ImportError as error:
            raise MissingDependencyError("peft loads an adapter", got=str(folder), fix="pip install peft") from error
        adapted: PreTrainedModel = AutoPeftModel.from_pretrained(str(folder), **arguments)
        return adapted
    config = AutoConfig.from_pretrained(folder)
    model_class = getattr(transformers, (config.architectures or ["AutoModelForCausalLM"])[0])
    model: PreTrainedModel = model_class.from_pretrained(folder, **arguments)
    return model
