"""How a model's folder says that it is to be sampled from."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import GenerationConfig


def get_generation_config(model: str, trust_remote_code: bool = False) -> GenerationConfig | None:
    """The settings of ``generation_config.json``, or those in ``config.json``; None where neither has any.

    Args:
        model: a model's folder, or its name on the hub.

    Source: transformers' ``GenerationConfig``.
    """
    from transformers import AutoConfig, GenerationConfig  # imported here: transformers takes seconds to import

    try:
        return GenerationConfig.from_pretrained(model)
    except OSError:
        pass
    try:
        config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    except (OSError, ValueError):  # no folder, or one whose config.json names no model
        return None
    return GenerationConfig.from_model_config(config)
