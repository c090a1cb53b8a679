"""A tool that shows a part of an image of the conversation, enlarged."""

from __future__ import annotations

from typing import Any

from PIL import Image

from verl.data.vision.images import ImageLimits, load_image
from verl.tools.base import BaseTool, Executed
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

NAME = "image_zoom_in_tool"
SCHEMA = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "Zooms in on a part of an image, so that details can be seen.",
        "parameters": {
            "type": "object",
            "properties": {
                "bbox_2d": {
                    "type": "array",
                    "items": {"type": "number"},
                    "description": "The part as [x1, y1, x2, y2] in pixels: its left, upper, right and lower edge.",
                },
                "label": {"type": "string", "description": "What the part shows."},
                "image": {"type": "integer", "description": "Number of the image, from 0; by default the first."},
            },
            "required": ["bbox_2d"],
        },
    },
}


class ZoomTool(BaseTool):
    """Cuts a box out of an image that the trajectory has seen, and enlarges it.

    A run that shows images at a lower resolution gives the tool the original of the first one, whose pixels are then
    those of ``bbox_2d``: a row's ``tools_kwargs.image_zoom_in_tool.create_kwargs.image``, in any form of an image.

    An image that is shown has the step reward 1, so that a reward function can count them; a call that cannot be
    carried out says why, without a reward.

    Args:
        config: ``min_side`` (28), pixels that the shorter edge of what is shown has at least.
    """

    def __init__(self, config: Any, tool_schema: Any = None):
        super().__init__(config, tool_schema)
        self.originals: dict[str, Image.Image] = {}

    async def create(
        self, instance_id: str | None = None, image: Any = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        """See `BaseTool.create`.

        Raises:
            DataError: ``image`` is none.
        """
        name, answer = await super().create(instance_id)
        if image is not None:
            self.originals[name] = load_image(image, f"tools_kwargs.{NAME}.create_kwargs.image", ImageLimits())
        return name, answer

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """See `BaseTool.release`."""
        self.originals.pop(instance_id, None)

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return OpenAIFunctionToolSchema.model_validate(SCHEMA)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Executed:
        """See `BaseTool.execute`; ``agent_data`` is the conversation."""
        images: list[Image.Image] = list(kwargs["agent_data"].seen.images)
        images[:1] = [self.originals.get(instance_id, images[0])] if images else []
        number = parameters.get("image", 0)
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < len(images):
            there = f"images are numbered from 0 to {len(images) - 1}" if images else "the conversation has none"
            return ToolResponse(text=f"There is no image {number!r:.100}: {there}."), None, {}
        picture = images[number]
        box = box_within(parameters.get("bbox_2d"), picture.size)
        if isinstance(box, str):
            return ToolResponse(text=box), None, {}
        return ToolResponse(image=[self._enlarged(picture.crop(box))]), 1.0, {}

    def _enlarged(self, part: Image.Image) -> Image.Image:
        factor = max(1.0, int(self.config.get("min_side", 28)) / min(part.size))
        return part.resize((round(part.width * factor), round(part.height * factor)), Image.Resampling.BICUBIC)


def box_within(box: Any, size: tuple[int, int]) -> tuple[int, int, int, int] | str:
    """The box in whole pixels, cut at the image's edges; or what is wrong with it, for the model.

    Args:
        box: what the model wrote as ``bbox_2d``.
        size: width and height of the image.
    """
    form = "bbox_2d is [x1, y1, x2, y2] in pixels with x1 < x2 and y1 < y2"
    width, height = size
    if not isinstance(box, list) or len(box) != 4:
        return f"{form}; got {box!r:.100}."
    if not all(isinstance(x, int | float) and not isinstance(x, bool) and abs(x) < 1e6 for x in box):
        return f"{form}, four numbers; got {box!r:.100}."
    left, upper, right, lower = (round(x) for x in box)
    left, right = max(left, 0), min(right, width)
    upper, lower = max(upper, 0), min(lower, height)
    if right - left < 1 or lower - upper < 1:
        return f"{form}, inside an image of {width} x {height} pixels; got {box!r:.100}."
    if max(right - left, lower - upper) > 100 * min(right - left, lower - upper):
        return f"{form}, with edges that differ by a factor of 100 at most; got {box!r:.100}."
    return left, upper, right, lower
