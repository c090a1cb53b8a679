"""Settings of data whose rows may have images."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.schema.node import ABSENT, ConfigNode, setting


@dataclass(frozen=True)
class ImageDataConfig(ConfigNode):
    """How the images of rows are read."""

    image_key: str = setting("images", "column with a row's images, in the order of <image> in its messages")
    video_key: str = setting("videos", "column with a row's videos, which are refused so far")
    mm_processor_kwargs: dict = setting(
        {},
        "arguments of the image processor; min_pixels and max_pixels bound every image that names no bounds of its own",
    )
    max_image_pixels: int = setting(
        50_000_000,
        "an image with more pixels is refused before it is decoded; Pillow itself refuses more than 178,956,970",
        upstream=ABSENT,
    )
    allow_remote_images: bool = setting(False, "fetch images that rows name by http:// or https://", upstream=ABSENT)
