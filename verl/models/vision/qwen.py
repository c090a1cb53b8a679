"""Qwen2-VL and Qwen2.5-VL: patches of any image size, a video's frames in one run of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from verl.errors import DataError
from verl.models.vision.family import Kind, Picture, VisionFamily

PIXELS: dict[Kind, tuple[str, str]] = {
    "image": ("pixel_values", "image_grid_thw"),
    "video": ("pixel_values_videos", "video_grid_thw"),
}
"""What the processor calls patches (patches, dim), and their grids (pictures, 3): frames, rows, columns of patches."""
SECONDS = "second_per_grid_ts"


class QwenVision(VisionFamily):
    """Qwen2-VL (arXiv 2409.12191) and Qwen2.5-VL (arXiv 2502.13923)."""

    axes = 3
    keys: ClassVar[frozenset[str]] = frozenset((*PIXELS["image"], *PIXELS["video"], SECONDS))

    def token_id(self, kind: Kind) -> int:
        return int(self.config.image_token_id if kind == "image" else self.config.video_token_id)

    def _pictures(self, inputs: Mapping[str, Tensor]) -> list[Picture]:
        return [*self._of_kind("image", inputs), *self._of_kind("video", inputs)]

    def _of_kind(self, kind: Kind, inputs: Mapping[str, Tensor]) -> Iterator[Picture]:
        pixels, grids = PIXELS[kind]
        if (pixels in inputs) != (grids in inputs):
            there, absent = (pixels, grids) if pixels in inputs else (grids, pixels)
            raise DataError(f"{there} is there and {absent} is not", key=f"multi_modal_inputs.{absent}")
        if pixels not in inputs:
            return
        sizes, first = inputs[grids].tolist(), 0
        patches = sum(frames * rows * columns for frames, rows, columns in sizes)
        if patches != len(inputs[pixels]) or min(map(min, sizes), default=1) < 1:
            message = f"the grids in {grids} have {patches} patches"
            raise DataError(message, key=f"multi_modal_inputs.{pixels}", got=len(inputs[pixels]))
        for number, (frames, rows, columns) in enumerate(sizes):
            count = frames * rows * columns
            tensors = {pixels: inputs[pixels][first : first + count], grids: inputs[grids][number : number + 1]}
            first += count
            yield self._picture(kind, tensors, self._in_tokens(frames, rows, columns), self._interval(inputs, number))

    def _picture(self, kind: Kind, tensors: dict[str, Tensor], grid: tuple[int, int, int], interval: float) -> Picture:
        """One picture of ``grid`` tokens."""
        frames, rows, columns = grid
        return Picture(kind, tensors, (frames * rows * columns,), grid, interval if kind == "video" else 1.0)

    def _in_tokens(self, frames: int, rows: int, columns: int) -> tuple[int, int, int]:
        merge = int(self.config.vision_config.spatial_merge_size)
        if rows % merge or columns % merge:
            raise DataError(
                f"the tower joins {merge} x {merge} patches to one token", key="image_grid_thw", got=(rows, columns)
            )
        return frames, rows // merge, columns // merge

    def _interval(self, inputs: Mapping[str, Tensor], number: int) -> float:
        """Positions between two frames of video ``number``: tokens per second, where the family has them."""
        per_second = getattr(self.config.vision_config, "tokens_per_second", None)
        if per_second is None:
            return 1.0
        return float(per_second) * (float(inputs[SECONDS][number]) if SECONDS in inputs else 1.0)

    def patches(self, picture: Picture) -> tuple[int, int]:
        pixels, grids = PIXELS[picture.kind]
        return len(picture.tensors[pixels]), int(picture.tensors[grids][0, 0])

    def smallest(self, kind: Kind) -> Picture:
        vision = self.config.vision_config
        merge = int(vision.spatial_merge_size)
        channels = int(getattr(vision, "in_channels", 3))
        dim = channels * int(vision.temporal_patch_size) * int(vision.patch_size) ** 2
        pixels, grids = PIXELS[kind]
        tensors = {pixels: torch.zeros(merge**2, dim), grids: torch.tensor([[1, merge, merge]])}
        return self._picture(kind, tensors, (1, 1, 1), 1.0)
