"""GLM-4.1V and GLM-4.5V: images as in Qwen2-VL; videos are not taken."""

from __future__ import annotations

from typing import ClassVar

from verl.models.vision.family import Kind
from verl.models.vision.qwen import PIXELS, QwenVision


class GlmVision(QwenVision):
    """GLM-4.1V-Thinking (arXiv 2507.01006). The frames of its videos have the placeholder of images: not built."""

    kinds: ClassVar[tuple[Kind, ...]] = ("image",)
    keys: ClassVar[frozenset[str]] = frozenset(PIXELS["image"])
