"""Tokenizer loading under the path that users' code imports; it lives in `verl.data.tokenizer`."""

from typing import Any

from verl.data.tokenizer import eos_token_ids, hf_tokenizer, normalize_token_ids
from verl.data.vision.processor import VisionProcessor, load_processor
from verl.metrics import notice


def hf_processor(name_or_path: Any, **kwargs: Any) -> VisionProcessor | None:
    """The image processor of a model, or None for a model that reads only text.

    Args:
        kwargs: ``trust_remote_code``; others have no effect, and a notice says so.
    """
    trusted = bool(kwargs.pop("trust_remote_code", False))
    if kwargs:
        notice("hf_processor", f"without effect: {', '.join(sorted(kwargs))}")
    return load_processor(name_or_path, trust_remote_code=trusted)
