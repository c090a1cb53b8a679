"""Where images stand in a conversation: markers in texts and parts of contents, in order.

A message that has images holds a list of parts, ``{"type": "text", "text": ...}`` and ``{"type": "image"}``, as chat
templates of vision models take it; others hold a text. While a row is read, an image part also has the image itself
(``"image"``), or gets it from the row's column of images.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from verl.data.messages import Message
from verl.errors import DataError, NotBuiltError

MARKER = re.compile(r"(<image>|<video>)")
VIDEOS = "videos are not built yet: a row may have images, such as pictures of the video"


def with_media(messages: Sequence[Message], images: Sequence[Any], where: Callable[[], str]) -> list[Message]:
    """The messages with a part for every image of a row, which holds it.

    ``<image>`` in a text, and image parts without an image of their own, take the images of the column in order.

    Args:
        images: of the row's column.

    Raises:
        DataError: there are not as many places as images. NotBuiltError: a place for a video.
    """
    waiting = list(images)
    places = 0
    placed: list[Message] = []
    for message in messages:
        content = message.get("content")
        parts: list[dict[str, Any]] = []
        for part in _split(content):
            if part["type"] == "video":
                raise NotBuiltError(f"{VIDEOS} ('<video>' in a message)", key=where())
            if part["type"] == "image" and "image" not in part:
                places += 1
                part = {"type": "image", "image": _limited(part, waiting.pop(0) if waiting else None)}
            parts.append(part)
        seen = any(part["type"] == "image" for part in parts)
        placed.append({**message, "content": parts} if seen else message)
    if places != len(images):
        raise DataError(
            f"the messages have {places} places for images, and the row has {len(images)} images",
            key=where(),
            fix="Write <image> once for each image, where it belongs.",
        )
    return placed


def image_parts(messages: Sequence[Message]) -> Iterator[dict[str, Any]]:
    """The image parts of a conversation, in order."""
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            yield from (part for part in content if part.get("type") == "image")


def bare(messages: Sequence[Message]) -> list[Message]:
    """The messages with image parts that only say that there is an image: text through and through."""
    return [
        {**m, "content": [_bare(part) for part in m["content"]]} if isinstance(m.get("content"), list) else m
        for m in messages
    ]


def text_of(content: Any) -> str:
    """The text of a content, without its images."""
    if isinstance(content, list):
        return "".join(part["text"] for part in content if part.get("type") == "text")
    return str(content)


def _bare(part: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "image"} if part.get("type") == "image" else dict(part)


def _limited(part: Mapping[str, Any], image: Any) -> Any:
    """The image of a column with the limits that its place names (``min_pixels``, ``max_pixels``)."""
    limits = {name: value for name, value in part.items() if name != "type"}
    return {**limits, "image": image} if limits else image


def _split(content: Any) -> list[dict[str, Any]]:
    """The parts of a content; a text is cut at its markers."""
    if not isinstance(content, list):
        pieces = MARKER.split(str(content))
        return [_of_piece(piece) for piece in pieces if piece]
    return [cut for part in content for cut in (_split(part["text"]) if part["type"] == "text" else [part])]


def _of_piece(piece: str) -> dict[str, Any]:
    return {"type": piece[1:-1]} if MARKER.fullmatch(piece) else {"type": "text", "text": piece}
