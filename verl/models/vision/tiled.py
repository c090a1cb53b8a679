"""Gemma 3, InternVL, SmolVLM: an image is one or more square tiles of one size, each with equally many tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from verl.errors import DataError
from verl.models.vision.family import Kind, Picture, VisionFamily

PIXELS, MASK = "pixel_values", "pixel_attention_mask"
"""(tiles, channels, height, width): crops and thumbnails of all images of a row, in the order of their tokens; and of
Idefics3, (tiles, height, width): which of their pixels are not padding."""


class TiledVision(VisionFamily):
    """A tower that takes tiles one by one: each tile is a picture here, whichever image it is cut from."""

    tower = ("vision_tower", "multi_modal_projector")
    kinds: ClassVar[tuple[Kind, ...]] = ("image",)
    keys: ClassVar[frozenset[str]] = frozenset((PIXELS,))

    def token_id(self, kind: Kind) -> int:
        return int(self.config.image_token_id)

    @property
    def tile(self) -> tuple[int, ...]:
        """Channels, height and width in pixels."""
        size = self.config.vision_config.image_size
        return int(self.config.vision_config.num_channels), *((size, size) if isinstance(size, int) else size)

    @property
    def tokens_per_tile(self) -> int:
        return int(self.config.mm_tokens_per_image)

    def _pictures(self, inputs: Mapping[str, Tensor]) -> list[Picture]:
        pixels = inputs.get(PIXELS, torch.zeros(0, *self.tile))
        if tuple(pixels.shape[1:]) != self.tile:
            raise DataError(
                f"the tower takes tiles of {self.tile} channels, rows and columns",
                key=f"multi_modal_inputs.{PIXELS}",
                got=tuple(pixels.shape),
                fix="Let the image processor resize to vision_config.image_size of config.json.",
            )
        return [self._picture(tile) for tile in pixels.split(1)] if len(pixels) else []

    def _picture(self, tile: Tensor) -> Picture:
        return Picture("image", {PIXELS: tile}, (self.tokens_per_tile,), (1, 1, self.tokens_per_tile))

    @property
    def patch_grid(self) -> tuple[int, int]:
        """Rows and columns of patches in a tile."""
        _, rows, columns = self.tile
        size = self.config.vision_config.patch_size
        height, width = (size, size) if isinstance(size, int) else size
        return rows // height, columns // width

    def patches(self, picture: Picture) -> tuple[int, int]:
        rows, columns = self.patch_grid
        return rows * columns, 1

    def smallest(self, kind: Kind) -> Picture:
        return self._picture(torch.zeros(1, *self.tile))


class GemmaVision(TiledVision):
    """Gemma 3 (arXiv 2503.19786): the tokens of a tile see each other in both directions."""

    sees_ahead = True


class InternVision(TiledVision):
    """InternVL 2.5 and 3 as transformers has them (arXiv 2504.10479)."""

    @property
    def tokens_per_tile(self) -> int:
        rows, columns = self.patch_grid
        return int(rows * columns * self.config.downsample_ratio**2)

    def patches(self, picture: Picture) -> tuple[int, int]:
        count, frames = super().patches(picture)
        return count + 1, frames  # one stands for the picture as such


class IdeficsVision(TiledVision):
    """SmolVLM and Idefics3 (arXiv 2504.05299, 2408.12637): a mark with row and column in front of each tile."""

    tower = ("vision_model", "connector")
    keys: ClassVar[frozenset[str]] = frozenset((PIXELS, MASK))

    @property
    def tokens_per_tile(self) -> int:
        rows, columns = self.patch_grid
        return rows * columns // int(self.config.scale_factor) ** 2

    def _pictures(self, inputs: Mapping[str, Tensor]) -> list[Picture]:
        if MASK in inputs and not inputs[MASK].all():
            fix = "Let the image processor resize to full tiles."
            raise DataError("padding in tiles is not built", key=f"multi_modal_inputs.{MASK}", fix=fix)
        tiles = {PIXELS: inputs[PIXELS].flatten(0, -4)} if PIXELS in inputs else {}  # its processor has an axis of rows
        return super()._pictures(tiles)

    def smallest(self, kind: Kind) -> Picture:
        return self._picture(torch.ones(1, *self.tile))  # the model takes zeros for no tile

    def prepare(self, pictures: Sequence[Picture]) -> dict[str, Tensor]:
        return {name: tensor[None] for name, tensor in super().prepare(pictures).items()}
