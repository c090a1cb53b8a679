"""The images and videos of one trajectory: those of its row, and images that tools answer with in later turns.

Tokens stay the truth: a prompt and what is inserted have as many placeholders as their images have features, in order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from verl.data.vision.images import ImageLimits, load_image
from verl.data.vision.processor import VisionProcessor, join_inputs
from verl.data.vision.videos import VideoClip
from verl.errors import RolloutError


class SeenImages:
    """What a trajectory has seen so far, as every request needs it.

    Attributes:
        images: pictures in the order of their placeholders.
        videos: those of the row, in the order of theirs.
        inputs: what the processor made of them; the row's own object until there are more.
        added: pictures that came after the row's own.

    Args:
        processor: of the policy; None for a model that reads only text.
        row: its columns ``multi_modal_data`` and ``multi_modal_inputs`` are read.
        limits: of pictures that come later.
    """

    def __init__(
        self,
        processor: VisionProcessor | None = None,
        row: Mapping[str, Any] | None = None,
        limits: ImageLimits | None = None,
    ):
        row = row or {}
        self.processor, self.limits = processor, limits or ImageLimits()
        data = row.get("multi_modal_data") or {}
        self.images: list[Any] = list(data.get("images") or ())
        self.videos: list[VideoClip] = list(data.get("videos") or ())
        self.inputs: Mapping[str, Tensor] = row.get("multi_modal_inputs") or {}
        self.added: list[Any] = []
        self._made: dict[int, tuple[Any, Mapping[str, Tensor]]] = {}
        """By the id of a picture; the picture is kept, since a freed id would be given again."""

    def prompt(self, ids: Sequence[int], images: Sequence[Any] | None = None) -> list[int]:
        """A prompt with one placeholder per image and video, expanded.

        Args:
            images: of the prompt; None: all that the trajectory has seen.
        """
        return self.expanded(ids, self.images if images is None else images, self.videos)

    def expanded(self, ids: Sequence[int], images: Sequence[Any], videos: Sequence[VideoClip] = ()) -> list[int]:
        """Tokens with one placeholder for each image and video, with as many as these have features.

        Raises:
            DataError: the template writes another number of placeholders.
        """
        if not images and not videos:
            return list(ids)
        processor = self._processor()
        return processor.expand(ids, processor.pieces(images, videos))

    def take(self, images: Sequence[Any]) -> None:
        """The images of a later turn: all requests from here on have them."""
        if not images:
            return
        processor = self._processor()
        if self.inputs or not (
            self.images or self.videos
        ):  # data.return_multi_modal_inputs=false leaves them out of all turns
            self.inputs = join_inputs([self.inputs, processor.process(images, "a later turn")[0]])
        self.images = [*self.images, *images]
        self.added = [*self.added, *images]

    def load(self, images: Sequence[Any], where: str) -> list[Any]:
        """Images that a tool answers with, in any form, as pictures.

        Raises:
            DataError: one is broken, or larger than the limits. RolloutError: the model reads only text.
        """
        self._processor()
        return [load_image(image, f"{where}, image {number}", self.limits) for number, image in enumerate(images)]

    def of_request(self, images: Sequence[Any] | None) -> tuple[Sequence[Any] | None, Mapping[str, Tensor] | None]:
        """Pictures and inputs of a request: what the trajectory has seen, or the pictures that its loop names.

        Videos are those of the row in both cases.
        """
        if images is None or (len(images) == len(self.images) and all(map(_same, images, self.images))):
            return self.images or None, self.inputs or None
        return list(images) or None, self._inputs_of(images) or None

    def of_trajectory(self, images: Sequence[Any]) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
        """The columns ``multi_modal_data`` and ``multi_modal_inputs`` of a trajectory that saw these pictures alone."""
        return {"images": list(images), "videos": list(self.videos)}, self._inputs_of(images)

    def _inputs_of(self, images: Sequence[Any]) -> Mapping[str, Tensor]:
        """What the processor makes of pictures; those of the request before are not processed again."""
        cache, self._made = self._made, {}
        shown = [*self.videos, *images]
        for one in shown:
            entry = cache.get(id(one)) or (one, self._processor().process([one], "a request")[0])
            self._made[id(one)] = entry
        return join_inputs([self._made[id(one)][1] for one in shown])

    def _processor(self) -> VisionProcessor:
        if self.processor is None:
            raise RolloutError("the model reads only text: it has no image processor", fix="Use a model that sees.")
        return self.processor


def _same(one: Any, other: Any) -> bool:
    return one is other
