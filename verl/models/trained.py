"""What a run saved, as Hugging Face's own model: nothing of this library is in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, PreTrainedModel
from transformers.utils import logging

__all__ = ["PreTrainedModel", "load_trained"]


def load_trained(folder: str | Path, **arguments: Any) -> PreTrainedModel:
    """The model of a folder in Hugging Face's form; an adapter comes with its base, from where it was trained.

    Args:
        arguments: of ``from_pretrained``.
    """
    if (Path(folder) / "adapter_config.json").is_file():
        from peft import AutoPeftModel

        adapted: PreTrainedModel = AutoPeftModel.from_pretrained(str(folder), **arguments)
        return adapted
    config = AutoConfig.from_pretrained(folder)
    model_class = getattr(transformers, (config.architectures or ["AutoModelForCausalLM"])[0])
    with _without_bars():
        model: PreTrainedModel = model_class.from_pretrained(folder, **arguments)
    return model


@contextmanager
def _without_bars() -> Iterator[None]:
    """The files are on this machine: a bar for them is noise."""
    shows = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shows:
            logging.enable_progress_bar()
