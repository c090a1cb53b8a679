"""What transformers' video processors make of frames, without torchvision, which these need."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from verl.json_text import read_json

PER_FRAME = {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28}
"""Pixels of a frame of Qwen2-VL and Qwen2.5-VL where the files say nothing."""
PER_VIDEO = {
    "qwen3_vl": {"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32},
    "qwen3_vl_moe": {"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32},
    "glm4v": {"shortest_edge": 112 * 112, "longest_edge": 2 * 30000 * 28 * 28},
    "glm4v_moe": {"shortest_edge": 112 * 112, "longest_edge": 2 * 30000 * 28 * 28},
}
"""Pixels of all frames together, of families that bound these."""
FILE = "video_preprocessor_config.json"


class FrameProcessor:
    """Frames as patches (the Qwen families) or as tiles (InternVL).

    Attributes:
        merge_size, temporal_patch_size: patches of an edge, and frames, that become one token.

    Args:
        facts: what the model's files say of its video processor.
        of_images: the image processor, for what they leave out.
    """

    def __init__(self, model_type: str, facts: Mapping[str, Any], of_images: Any):
        self.is_tiled = model_type == "internvl"
        self.volume = model_type in PER_VIDEO
        self.patch_size, self.merge_size, self.temporal_patch_size = (
            int(facts[name] if name in facts else getattr(of_images, name, 1))
            for name in ("patch_size", "merge_size", "temporal_patch_size")
        )
        size = dict(facts.get("size") or PER_VIDEO.get(model_type, PER_FRAME))
        for old, new in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
            if facts.get(old) is not None:
                size[new] = facts[old]
        self.size = size
        mean, std = (facts.get(name) or getattr(of_images, name) for name in ("image_mean", "image_std"))
        self.mean, self.std = (255 * torch.tensor(value).view(1, 3, 1, 1) for value in (mean, std))

    @classmethod
    def of(cls, config: Any, folder: str, facts: Mapping[str, Any], of_images: Any) -> FrameProcessor:
        """From a model's folder: its file for videos, else what it says of images.

        Args:
            facts: of the processor's other files.
        """
        file = Path(folder) / FILE
        nested = facts.get("video_processor")
        of_videos = nested if isinstance(nested, dict) else read_json(file.read_bytes()) if file.is_file() else None
        return cls(config.model_type, facts if of_videos is None else of_videos, of_images)

    def __call__(
        self, videos: Sequence[np.ndarray], video_metadata: Any = None, device: str | None = None, **_: Any
    ) -> dict[str, Any]:
        """(frames, height, width, 3) uint8 of each video, as tensors by the names of transformers.

        Args:
            device: ``meta`` makes the grids alone: pixels are neither read nor computed.
        """
        made, grids = [], []
        for video in videos:
            if device == "meta":
                target = self._target(len(video), 3, *video.shape[1:3])
                scaled = torch.empty(len(video), 3, *target, device=device)
            else:
                frames = torch.from_numpy(np.ascontiguousarray(video)).permute(0, 3, 1, 2)
                frames = F.interpolate(frames, self._target(*frames.shape), mode="bicubic", antialias=True)
                scaled = (frames.float() - self.mean) / self.std
            if self.is_tiled:
                made.append(scaled)
                continue
            patches, grid = self._patches(scaled)
            made.append(patches)
            grids.append(grid)
        about = {"video_metadata": video_metadata}
        if self.is_tiled:
            return {"pixel_values_videos": torch.stack(made), **about}
        return {"pixel_values_videos": torch.cat(made), "video_grid_thw": torch.tensor(grids), **about}

    def _target(self, frames: int, _: int, height: int, width: int) -> tuple[int, int]:
        """Height and width: multiples of what one token covers, in proportion, within the limits on pixels."""
        if self.is_tiled:
            return int(self.size["height"]), int(self.size["width"])
        unit, joined = self.patch_size * self.merge_size, self.temporal_patch_size
        if self.volume:
            if min(height, width) < unit:
                height, width = (int(edge * max(unit / height, unit / width)) for edge in (height, width))
            counted, depth = round(frames / joined) * joined, frames
        else:
            counted = depth = 1
        least, most = self.size["shortest_edge"], self.size["longest_edge"]

        def in_units(rounded: Callable[[float], int], scale: float) -> tuple[int, int]:
            rows, columns = (max(1, rounded(edge * scale / unit)) * unit for edge in (height, width))
            return rows, columns

        rows, columns = round(height / unit) * unit, round(width / unit) * unit
        if counted * rows * columns > most:
            return in_units(math.floor, math.sqrt(most / (depth * height * width)))
        if counted * rows * columns < least:
            return in_units(math.ceil, math.sqrt(least / (depth * height * width)))
        return rows, columns

    def _patches(self, frames: Tensor) -> tuple[Tensor, list[int]]:
        """(patches, dim) in the order of the tower: the patches of one token are next to each other."""
        joined, side, merged = self.temporal_patch_size, self.patch_size, self.merge_size
        missing = -len(frames) % joined
        frames = torch.cat((frames, frames[-1:].expand(missing, -1, -1, -1)))
        times, rows, columns = len(frames) // joined, frames.shape[2] // side, frames.shape[3] // side
        blocks = frames.unflatten(0, (times, joined)).unflatten(4, (-1, merged, side)).unflatten(3, (-1, merged, side))
        # time, frame, channel, row of tokens, row in it, y, column of tokens, column in it, x
        return blocks.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(times * rows * columns, -1), [times, rows, columns]
