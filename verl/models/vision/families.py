"""Which families of models that see are built."""

from __future__ import annotations

from typing import Any

from verl.config.machine.models import SEEN
from verl.models.vision.family import VisionFamily
from verl.models.vision.glm import GlmVision
from verl.models.vision.qwen import QwenVision
from verl.models.vision.qwen3 import Qwen3Vision
from verl.models.vision.tiled import GemmaVision, IdeficsVision, InternVision

FAMILIES: dict[str, type[VisionFamily]] = {
    "qwen2_vl": QwenVision,
    "qwen2_5_vl": QwenVision,
    "qwen3_vl": Qwen3Vision,
    "qwen3_vl_moe": Qwen3Vision,
    "glm4v": GlmVision,
    "glm4v_moe": GlmVision,
    "gemma3": GemmaVision,
    "internvl": InternVision,
    "idefics3": IdeficsVision,
    "smolvlm": IdeficsVision,
}
assert FAMILIES.keys() == SEEN.keys(), "the settings accept other families than those that are built"


def family_of(config: Any) -> VisionFamily | None:
    """The family of a model by its configuration; None where it reads text alone."""
    kind = FAMILIES.get(getattr(config, "model_type", ""))
    return None if kind is None or not hasattr(config, "vision_config") else kind(config)
