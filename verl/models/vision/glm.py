"""GLM-4.1V and GLM-4.5V: as Qwen3-VL, but the frames of a video have the placeholder of images."""

from __future__ import annotations

import numpy as np

from verl.models.vision.family import Kind
from verl.models.vision.qwen3 import Qwen3Vision


class GlmVision(Qwen3Vision):
    """GLM-4.1V-Thinking and GLM-4.5V (arXiv 2507.01006): each frame stands between marks, a time stamp behind it."""

    def token_id(self, kind: Kind) -> int:
        return int(self.config.image_token_id)

    def _marks(self) -> set[int]:
        return {*super()._marks(), int(self.config.video_start_token_id)}

    def _is_placeholder(self, ids: np.ndarray, kind: Kind) -> np.ndarray:
        """Frames stand between the marks of a video, which begins with that of its first frame."""
        here, numbers = ids == self.config.image_token_id, np.arange(len(ids))
        begins = ids == self.config.video_start_token_id
        begins[:-1] &= ids[1:] == self.config.image_start_token_id  # a mark that the model drew begins none
        starts, ends = (
            np.maximum.accumulate(np.where(marks, numbers, -1))
            for marks in (begins, ids == self.config.video_end_token_id)
        )
        return here & ((starts > ends) == (kind == "video"))
