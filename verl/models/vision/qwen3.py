"""Qwen3-VL, dense and mixture: as its predecessors, with a time stamp as text in front of each frame of a video."""

from __future__ import annotations

from torch import Tensor

from verl.models.vision.family import Kind, Picture
from verl.models.vision.qwen import QwenVision


class Qwen3Vision(QwenVision):
    """Qwen3-VL (arXiv 2511.21631); features of inner layers of the tower go into the first decoder layers, too."""

    def _picture(self, kind: Kind, tensors: dict[str, Tensor], grid: tuple[int, int, int], interval: float) -> Picture:
        frames, rows, columns = grid
        if kind == "image":
            return super()._picture(kind, tensors, grid, interval)
        return Picture(kind, tensors, (rows * columns,) * frames, (1, rows, columns))
