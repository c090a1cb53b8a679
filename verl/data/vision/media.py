"""The images of one row: from its columns and messages to pictures, to the model's inputs, and to expanded prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from verl.data.messages import Message
from verl.data.overlong import truncate
from verl.data.settings import read, read_mapping
from verl.data.vision.images import ImageLimits, fitted_size, load_image, open_image, pixel_range, upright_size
from verl.data.vision.parts import bare, image_parts, with_media
from verl.data.vision.processor import Inputs, VisionProcessor
from verl.errors import DataError, NotBuiltError

Where = Callable[[], str]


@dataclass(frozen=True)
class SeenRow:
    """A row whose images are read.

    Args:
        messages: with parts that only say where images are: what templates, dumps and files take.
        images: RGB, in order.
        inputs: what the processor made of them; empty where there are none.
        pieces: of each image, the ids that stand for it in the prompt.
    """

    messages: list[Message]
    images: list[Image.Image]
    inputs: Inputs
    pieces: list[list[int]]

    @property
    def data(self) -> dict[str, list[Any]]:
        """The column ``multi_modal_data``."""
        return {"images": self.images, "videos": []}


class RowMedia:
    """Reads the images of a data set's rows.

    Args:
        processor: of the model; a processor of transformers is taken, too.
        config: the ``data`` section.
    """

    def __init__(self, processor: Any, config: Any):
        if not isinstance(processor, VisionProcessor):
            processor = VisionProcessor(processor)
        self.processor = processor.with_arguments(read_mapping(config, "mm_processor_kwargs"))
        self.limits = ImageLimits.of(config)
        self.image_key = str(read(config, "image_key", "images"))
        self.video_key = str(read(config, "video_key", "videos"))

    @classmethod
    def of(cls, processor: Any, config: Any) -> RowMedia | None:
        """None for a model that reads only text."""
        return None if processor is None else cls(processor, config)

    def placed(self, messages: Sequence[Message], row: Mapping[str, Any], where: Where) -> list[Message]:
        """The messages with the images of the row's column in their places.

        A text that says ``<image>`` stays as it is in data without such a column: people write about HTML.

        Raises:
            DataError: there are not as many places as images. NotBuiltError: the row has videos.
        """
        if _listed(row.get(self.video_key)):
            raise NotBuiltError("videos are not built yet", key=f"{where()}, column {self.video_key!r}")
        if self.image_key not in row and not any("image" not in part for part in image_parts(messages)):
            return list(messages)
        return with_media(messages, _listed(row.get(self.image_key)), where)

    def longer(self, messages: Sequence[Message], where: Where) -> int:
        """Ids of the images beyond their placeholders, from their headers alone."""
        more = 0
        for number, part in enumerate(image_parts(messages)):
            place = f"{where()}, image {number}"
            value = part.get("image")
            image = open_image(value, place, self.limits)
            size = fitted_size(upright_size(image), *pixel_range(value, place, self.limits))
            more += len(self.processor.piece(size, place)) - 1
        return more

    def see(self, messages: Sequence[Message], where: Where) -> SeenRow:
        """The row with its images decoded and processed.

        Raises:
            DataError: an image that is refused, or broken.
        """
        images = [
            load_image(part.get("image"), f"{where()}, image {number}", self.limits)
            for number, part in enumerate(image_parts(messages))
        ]
        inputs, pieces = self.processor.process(images, where())
        return SeenRow(bare(messages), images, inputs, pieces)


def refuse_images(messages: Sequence[Message], where: Where) -> None:
    """Raise a `DataError` for a conversation with images, of a model that reads only text."""
    if any(True for _ in image_parts(messages)):
        raise DataError(
            "the row has images, and the model reads only text",
            key=where(),
            fix="Use a model with an image processor (preprocessor_config.json), or take the images out.",
        )


def retained_places(ids: Sequence[int], limit: int, how: str, image_ids: frozenset[int]) -> list[int]:
    """The places of ``ids`` that `truncate` keeps.

    Args:
        image_ids: ids that stand for parts of images.

    Raises:
        DataError: a part of an image would be lost, or what begins or ends one.
    """
    places = truncate(list(range(len(ids))), limit, how)
    seen = {place + side for place, number in enumerate(ids) if number in image_ids for side in (-1, 0, 1)}
    if not seen & set(range(len(ids))) <= set(places):
        raise DataError(
            f"truncation would cut through an image: with its images the row has {len(ids)} tokens, more than {limit}",
            fix="Allow longer rows, or set a lower data.mm_processor_kwargs.max_pixels.",
        )
    return places


def _listed(value: Any) -> list[Any]:
    """The images of a column: a list, one alone, or none."""
    if value is None:
        return []
    if isinstance(value, np.ndarray) and value.dtype == object:
        return value.tolist()
    return list(value) if isinstance(value, (list, tuple)) else [value]
