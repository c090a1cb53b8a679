"""Samples as text for people: an image of a prompt is named once, not written as its hundreds of placeholders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from verl.data.vision.images import describe_image
from verl.protocol import DataProto

IMAGES = "multi_modal_data"


class SampleTexts:
    """Decodes prompts and responses.

    Args:
        tokenizer: of the policy.
        processor: of the policy; None for a model that reads only text.
    """

    def __init__(self, tokenizer: Any, processor: Any = None):
        self.tokenizer, self.processor = tokenizer, processor

    def of(self, batch: DataProto) -> tuple[list[str], list[str]]:
        """(prompts, responses) of a batch without special tokens; ``[image 56x56]`` stands for an image."""
        sides = batch.tensors["prompts"], batch.tensors["responses"]
        shown = self._images(batch)
        if not any(shown):
            decode = self.tokenizer.batch_decode
            prompts, responses = (decode(side, skip_special_tokens=True) for side in sides)
            return prompts, responses
        prompts, responses = [], []
        for prompt, response, images in zip(*(side.tolist() for side in sides), shown):
            left = iter(images)
            prompts.append(self._text(prompt, left))
            responses.append(self._text(response, left))
        return prompts, responses

    def columns(self, batch: DataProto) -> dict[str, list[Any]]:
        """``images`` of each row, as size and digest, for a dump; nothing where no row has any."""
        shown = self._images(batch)
        if not any(shown):
            return {}
        known = {id(image): describe_image(image) for images in shown for image in images}
        return {"images": [[known[id(image)] for image in images] for images in shown]}

    def _images(self, batch: DataProto) -> list[Sequence[Any]]:
        if self.processor is None or IMAGES not in batch.non_tensor_batch:
            return [()] * len(batch)
        return [(seen or {}).get("images") or () for seen in batch.non_tensor_batch[IMAGES]]

    def _text(self, ids: list[int], images: Iterator[Any]) -> str:
        """The ids as text, with a name for each image whose ids they hold."""
        parts: list[str] = []
        at, marks = 0, self.processor.image_token_ids
        while True:
            start = next((place for place in range(at, len(ids)) if ids[place] in marks), None)
            image = None if start is None else next(images, None)
            if start is None or image is None:
                return "".join([*parts, self.tokenizer.decode(ids[at:], skip_special_tokens=True)])
            piece = self.processor.piece(image.size)
            before = next(place for place, number in enumerate(piece) if number in marks)
            parts.append(self.tokenizer.decode(ids[at : start - before], skip_special_tokens=True))
            parts.append(f"[image {image.width}x{image.height}]")
            at = start - before + len(piece)
