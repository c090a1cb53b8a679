"""The images and videos of one row: from its columns and messages to pictures, the model's inputs, and its tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from verl.data.messages import MEDIA, Message
from verl.data.overlong import truncate
from verl.data.settings import read, read_mapping
from verl.data.vision.images import fitted_size, load_image, open_image, pixel_range, upright_size
from verl.data.vision.parts import bare, media_parts, with_media
from verl.data.vision.processor import Inputs, Pieces, VisionProcessor
from verl.data.vision.videos import VideoClip, VideoLimits, load_video, open_video
from verl.errors import DataError

if TYPE_CHECKING:
    from verl.config.schema.node import SettingsSource

Where = Callable[[], str]


@dataclass(frozen=True)
class SeenRow:
    """A row whose images and videos are read.

    Args:
        messages: with parts that only say where they are: what templates, dumps and files take.
        images, videos: RGB, in order.
        inputs: what the processor made of them; empty where there are none.
        pieces: of each, the ids that stand for it in the prompt.
    """

    messages: list[Message]
    images: list[Image.Image]
    videos: list[VideoClip]
    inputs: Inputs
    pieces: Pieces

    @property
    def data(self) -> dict[str, list[Any]]:
        """The column ``multi_modal_data``."""
        return {"images": self.images, "videos": self.videos}


class RowMedia:
    """Reads the images and videos of a data set's rows.

    Args:
        processor: of the model; a processor of transformers is taken, too.
        config: the ``data`` section.
    """

    def __init__(self, processor: VisionProcessor | None, config: SettingsSource):
        if not isinstance(processor, VisionProcessor):
            processor = VisionProcessor(processor)
        self.processor = processor.with_arguments(read_mapping(config, "mm_processor_kwargs"))
        self.limits = VideoLimits.of(config)
        self.image_key = str(read(config, "image_key", "images"))
        self.video_key = str(read(config, "video_key", "videos"))

    @classmethod
    def of(cls, processor: VisionProcessor | None, config: SettingsSource) -> RowMedia | None:
        """None for a model that reads only text."""
        return None if processor is None else cls(processor, config)

    def placed(self, messages: Sequence[Message], row: Mapping[str, Any], where: Where) -> list[Message]:
        """The messages with the images and videos of the row's columns in their places.

        A text that says ``<image>`` stays as it is in data without such a column: people write about HTML.

        Raises:
            DataError: there are not as many places as images or videos.
        """
        unfilled = {part["type"] for part in media_parts(messages) if part["type"] not in part}
        keys = {"image": self.image_key, "video": self.video_key}
        columns = {kind: _listed(row.get(key)) for kind, key in keys.items() if key in row or kind in unfilled}
        return with_media(messages, columns, where) if columns else list(messages)

    def longer(self, messages: Sequence[Message], where: Where) -> int:
        """Ids of images and videos beyond their placeholders, from their headers alone."""
        more = 0
        for kind, value, place in _numbered(messages, where):
            if kind == "video":
                shape = open_video(value, place, self.limits, self._step(place))
                more += len(self.processor.clip_piece(shape, place)) - 1
                continue
            image = open_image(value, place, self.limits.images)
            size = fitted_size(upright_size(image), *pixel_range(value, place, self.limits.images))
            more += len(self.processor.piece(size, place)) - 1
        return more

    def see(self, messages: Sequence[Message], where: Where) -> SeenRow:
        """The row with its images and videos decoded and processed.

        Raises:
            DataError: one is refused, or broken.
        """
        media: list[Any] = []
        for kind, value, place in _numbered(messages, where):
            if kind == "image":
                media.append(load_image(value, place, self.limits.images))
            else:
                media.append(load_video(value, place, self.limits, self._step(place)))
        inputs, pieces = self.processor.process(media, where())
        images = [one for one in media if isinstance(one, Image.Image)]
        videos = [one for one in media if not isinstance(one, Image.Image)]
        return SeenRow(bare(messages), images, videos, inputs, pieces)

    def _step(self, place: str) -> int:
        """Frames that the tower joins."""
        self.processor.check_videos(place)
        return self.processor.frames_per_token


def refuse_images(messages: Sequence[Message], where: Where) -> None:
    """Raise a `DataError` for a conversation with images or videos, of a model that reads only text."""
    for part in media_parts(messages):
        kind = part["type"]
        raise DataError(
            f"the row has {kind}s, and the model reads only text",
            key=where(),
            fix=f"Use a model with an image processor (preprocessor_config.json), or take the {kind}s out.",
        )


def _numbered(messages: Sequence[Message], where: Where) -> Iterator[tuple[str, Any, str]]:
    """Kind, value and place of the images and videos of a row."""
    counts = dict.fromkeys(MEDIA, 0)
    for part in media_parts(messages):
        kind = part["type"]
        yield kind, part.get(kind), f"{where()}, {kind} {counts[kind]}"
        counts[kind] += 1


def retained_places(ids: Sequence[int], limit: int, how: str, image_ids: frozenset[int]) -> list[int]:
    """The places of ``ids`` that `truncate` keeps.

    Args:
        image_ids: ids that stand for parts of images and videos.

    Raises:
        DataError: a part of an image would be lost, or what begins or ends one.
    """
    places = truncate(list(range(len(ids))), limit, how)
    seen = {place + side for place, number in enumerate(ids) if number in image_ids for side in (-1, 0, 1)}
    if not seen & set(range(len(ids))) <= set(places):
        raise DataError(
            f"truncation would cut through an image or video: with it the row has {len(ids)} tokens, over {limit}",
            fix="Allow longer rows, or set a lower data.mm_processor_kwargs.max_pixels.",
        )
    return places


def _listed(value: Any) -> list[Any]:
    """The images or videos of a column: a list, one alone, or none."""
    if value is None:
        return []
    if isinstance(value, np.ndarray) and value.dtype == object:
        return value.tolist()
    return list(value) if isinstance(value, (list, tuple)) else [value]
