"""Where images and videos stand in a conversation: markers in texts and parts of contents, in order.

A message that has some holds a list of parts, ``{"type": "text", "text": ...}``, ``{"type": "image"}`` and
``{"type": "video"}``, as chat templates of vision models take it; others hold a text. While a row is read, such a part
also has the image itself (``"image"``, ``"video"``), or gets it from the row's column.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from verl.data.messages import MEDIA, Message
from verl.errors import DataError


def with_media(
    messages: Sequence[Message], columns: Mapping[str, Sequence[Any]], where: Callable[[], str]
) -> list[Message]:
    """The messages with a part for every image and video of a row, which holds it.

    ``<image>`` in a text, and image parts that hold none, take the images of the column in order; so do
    videos.

    Args:
        columns: kind -> those of the row's column. The markers of other kinds are text.

    Raises:
        DataError: there are not as many places as images, or as videos.
    """
    waiting, places = {kind: list(values) for kind, values in columns.items()}, dict.fromkeys(columns, 0)
    placed: list[Message] = []
    for message in messages:
        parts: list[dict[str, Any]] = []
        for part in _split(message.get("content"), columns):
            kind = part["type"]
            if kind in columns and kind not in part:
                places[kind] += 1
                part = {"type": kind, kind: _limited(part, waiting[kind].pop(0) if waiting[kind] else None)}
            parts.append(part)
        seen = any(part["type"] in MEDIA for part in parts)
        placed.append({**message, "content": parts} if seen else message)
    for kind, values in columns.items():
        if places[kind] != len(values):
            raise DataError(
                f"the messages have {places[kind]} places for {kind}s, and the row has {len(values)} {kind}s",
                key=where(),
                fix=f"Write <{kind}> once for each {kind}, where it belongs.",
            )
    return placed


def media_parts(messages: Sequence[Message]) -> Iterator[dict[str, Any]]:
    """The image and video parts of a conversation, in order."""
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            yield from (part for part in content if part.get("type") in MEDIA)


def bare(messages: Sequence[Message]) -> list[Message]:
    """The messages with parts that only say that there is an image or a video: text through and through."""
    return [
        {**m, "content": [_bare(part) for part in m["content"]]} if isinstance(m.get("content"), list) else m
        for m in messages
    ]


def text_of(content: object) -> str:
    """The text of a content, without its images and videos."""
    if isinstance(content, list):
        return "".join(part["text"] for part in content if part.get("type") == "text")
    return str(content)


def _bare(part: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": part["type"]} if part.get("type") in MEDIA else dict(part)


def _limited(part: Mapping[str, Any], value: Any) -> Any:
    """An image or video of a column with the limits that its place names, such as ``max_pixels``."""
    limits = {name: inner for name, inner in part.items() if name != "type"}
    return {**limits, part["type"]: value} if limits else value


def _split(content: Any, kinds: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The parts of a content; a text is cut at the markers of these kinds."""
    if isinstance(content, list):
        return [cut for part in content for cut in (_split(part["text"], kinds) if part["type"] == "text" else [part])]
    pieces = re.split(f"<({'|'.join(kinds)})>", str(content))  # texts, and between them kinds
    parts = [{"type": kind} if at % 2 else {"type": "text", "text": kind} for at, kind in enumerate(pieces)]
    return [part for part in parts if part.get("text") != ""]
