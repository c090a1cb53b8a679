"""The images and videos of one trajectory: those of its row, and those that tools show in later turns.

Tokens stay the truth: a prompt and what is inserted have as many placeholders as their images have features, in order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image
from torch import Tensor

from verl.data.vision.images import describe_image, load_image
from verl.data.vision.processor import VisionProcessor, join_inputs
from verl.data.vision.videos import VideoClip, VideoLimits, describe_clip, load_video
from verl.errors import NotBuiltError, RolloutError
from verl.tools.runner import in_thread


@dataclass(frozen=True)
class ShownMedia:
    """Pictures and clips of one message, in the order of their placeholders."""

    media: tuple[Image.Image | VideoClip, ...] = ()

    @property
    def images(self) -> list[Image.Image]:
        return [one for one in self.media if isinstance(one, Image.Image)]

    @property
    def videos(self) -> list[VideoClip]:
        return [one for one in self.media if not isinstance(one, Image.Image)]

    def content(self, text: str) -> str | list[dict[str, Any]]:
        """The content of a message that shows them before a text."""
        if not self.media:
            return text
        parts = [{"type": "image" if isinstance(one, Image.Image) else "video"} for one in self.media]
        return [*parts, {"type": "text", "text": text}] if text else parts

    def entry(self) -> dict[str, list[str]]:
        """Their sizes by kind, for people; without kinds of which there are none."""
        images, videos = map(describe_image, self.images), map(describe_clip, self.videos)
        return {kind: shown for kind, shown in (("images", [*images]), ("videos", [*videos])) if shown}


NOTHING = ShownMedia()


class SeenImages:
    """What a trajectory has seen so far, as every request needs it.

    Attributes:
        images: pictures in the order of their placeholders.
        videos: clips in the order of theirs.
        inputs: what the processor made of them; the row's own object until there are more.
        added: pictures and clips that came after the row's.

    Args:
        processor: of the policy; None for a model that reads only text.
        row: its columns ``multi_modal_data`` and ``multi_modal_inputs`` are read.
        limits: of pictures and videos that come later.
    """

    def __init__(
        self,
        processor: VisionProcessor | None = None,
        row: Mapping[str, Any] | None = None,
        limits: VideoLimits | None = None,
    ):
        row = row or {}
        self.processor, self.limits = processor, limits or VideoLimits()
        data = row.get("multi_modal_data") or {}
        self.images: list[Any] = list(data.get("images") or ())
        self.videos: list[VideoClip] = list(data.get("videos") or ())
        self.inputs: Mapping[str, Tensor] = row.get("multi_modal_inputs") or {}
        self.added: list[Image.Image | VideoClip] = []
        self._made: dict[int, tuple[Any, Mapping[str, Tensor]]] = {}
        """By the id of a picture or clip, which is kept, since a freed id would be given again."""

    def prompt(
        self, ids: Sequence[int], images: Sequence[Any] | None = None, videos: Sequence[VideoClip] | None = None
    ) -> list[int]:
        """A prompt with one placeholder per image and video, expanded.

        Args:
            images, videos: of the prompt; None: all that the trajectory has seen.
        """
        return self.expanded(ids, self.images if images is None else images, self.videos if videos is None else videos)

    def expanded(self, ids: Sequence[int], images: Sequence[Any], videos: Sequence[VideoClip] = ()) -> list[int]:
        """Tokens with one placeholder for each image and video, with as many as these have features.

        Raises:
            DataError: the template writes another number of placeholders.
        """
        if not images and not videos:
            return list(ids)
        processor = self._processor()
        return processor.expand(ids, processor.pieces(images, videos))

    async def take(self, media: Sequence[Image.Image | VideoClip]) -> None:
        """Pictures and clips of a later turn, in order: all requests from here on have them.

        They are resized in a thread, since all trajectories share the event loop. Nothing changes before that is done.

        Raises:
            DataError: the processor refuses one. RolloutError: the model reads only text.
        """
        if not media:
            return
        processor = self._processor()
        is_bare = not self.inputs and (self.images or self.videos)  # data.return_multi_modal_inputs=false: in all turns
        if not is_bare:
            earlier = self.inputs
            self.inputs = await in_thread(lambda: join_inputs([earlier, processor.process(media, "a later turn")[0]]))
        shown = ShownMedia(tuple(media))
        self.images, self.videos = [*self.images, *shown.images], [*self.videos, *shown.videos]
        self.added = [*self.added, *media]

    def load(self, images: Sequence[object], where: str, first: int = 0) -> list[Image.Image]:
        """Images that a tool answers with, in any form, as pictures.

        Args:
            first: number of the first one, for messages.

        Raises:
            DataError: one is broken, or larger than the limits. RolloutError: the model reads only text.
        """
        self._processor()
        limits = self.limits.images
        return [load_image(image, f"{where}, image {number}", limits) for number, image in enumerate(images, first)]

    def load_videos(self, videos: Sequence[object], where: str, first: int = 0) -> list[VideoClip]:
        """Videos that a tool answers with, in any form, as the frames that the model sees.

        Args:
            first: number of the first one, for messages.

        Raises:
            DataError: one is broken or larger than the limits, or the model takes no videos.
            NotBuiltError: no installed package reads such a file.
            RolloutError: the model reads only text.
        """
        processor = self._processor()
        processor.check_videos(where)
        step = processor.frames_per_token
        return [
            load_video(one, f"{where}, video {number}", self.limits, step) for number, one in enumerate(videos, first)
        ]

    def of_request(
        self, images: Sequence[Any] | None, videos: Sequence[VideoClip] | None = None
    ) -> tuple[Sequence[Any] | None, Sequence[VideoClip] | None, Mapping[str, Tensor] | None]:
        """Pictures, clips and inputs of a request: what the trajectory has seen, or what its loop names."""
        images, videos = self.images if images is None else images, self.videos if videos is None else videos
        if [*map(id, images), *map(id, videos)] == [*map(id, self.images), *map(id, self.videos)]:
            return self.images or None, self.videos or None, self.inputs or None
        return list(images) or None, list(videos) or None, self._inputs_of(images, videos) or None

    def of_trajectory(self, images: Sequence[Any]) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
        """The columns ``multi_modal_data`` and ``multi_modal_inputs`` of a trajectory that saw these pictures alone."""
        return {"images": list(images), "videos": list(self.videos)}, self._inputs_of(images, self.videos)

    def _inputs_of(self, images: Sequence[Any], videos: Sequence[VideoClip]) -> Mapping[str, Tensor]:
        """What the processor makes of pictures and clips; those of the request before are not processed again.

        Raises:
            NotBuiltError: both kinds, and a family that takes frames as images: their order is not known.
        """
        cache, self._made = self._made, {}
        for one in (*videos, *images):
            entry = cache.get(id(one)) or (one, self._processor().process([one], "a request")[0])
            self._made[id(one)] = entry
        of_videos, of_images = (join_inputs([self._made[id(one)][1] for one in kind]) for kind in (videos, images))
        if of_videos.keys() & of_images.keys():
            raise NotBuiltError(
                "a loop named images and videos of a request, and this family takes frames as images",
                key="image_data",
                fix="Leave image_data and video_data out: the request then has all that the trajectory has seen.",
            )
        return {**of_videos, **of_images}

    def _processor(self) -> VisionProcessor:
        if self.processor is None:
            raise RolloutError("the model reads only text: it has no image processor", fix="Use a model that sees.")
        return self.processor
