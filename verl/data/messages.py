"""One form for a conversation, whatever a file or a user's dataset held: a list of plain message dicts.

Parquet gives every message the union of all fields and fills the rest with null; a template that asks whether a field
is there must not see those nulls, so they are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from verl.errors import DataError, NotBuiltError, suggest
from verl.json_text import read_json
from verl.metrics import notice

Message = dict[str, Any]
Where = Callable[[], str]
"""Names the row for a message: only called when something is wrong with it."""
PART_TYPES = {
    **{"image": "image", "image_url": "image", "input_image": "image", "text": "text", "input_text": "text"},
    **{"video": "video", "video_url": "video"},
}
"""Types of parts as messages and OpenAI's clients write them, and what they are here."""
IMAGE_NAMES = ("bytes", "image", "image_url", "url", "path")
"""Where a part or a row's image has the image itself."""
VIDEO_NAMES = ("bytes", "video", "video_url", "url", "path")
"""The same of a video."""
MEDIA_NAMES = {"image": IMAGE_NAMES, "video": VIDEO_NAMES}
MEDIA = tuple(MEDIA_NAMES)
REFUSED_TYPES = ("audio", "input_audio", "audio_url")


def as_messages(value: object, where: Where, media: Sequence[str] = (), padded: bool = True) -> list[Message]:
    """A conversation from a list of messages, a numpy array of them, their JSON text, or one plain string.

    A plain string becomes one user message, with a notice. Contents that consist of text parts are joined; one with an
    image stays a list of parts, ``{"type": "text", "text": ...}`` and ``{"type": "image"}``, with the image, if the
    part has one, as ``"image"`` (OpenAI's ``image_url`` parts, too); likewise one with a video. Arguments of calls stay
    the text that they are: a `ChatTemplate` knows which form its template writes.

    Args:
        media: what parts may be besides text, of `MEDIA`.
        padded: whether nulls only fill columns; in JSON text a null is its author's. The fields of a message lose them.

    Raises:
        DataError: null, empty, or not messages with a role and a content; a part of a type that there is not.
        NotBuiltError: a part that is a sound, or an image or a video where none is taken.
    """
    if isinstance(value, str):
        value, padded = _from_text(value, where), False
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, Sequence) or isinstance(value, (bytes, str)):
        raise DataError("not a conversation", key=where(), got=value, allowed="a list of {role, content}, or a string")
    if not value:
        raise DataError("the conversation is empty", key=where())
    return [_message(message, number, where, media, padded) for number, message in enumerate(value)]


def as_tools(value: object, where: Where, padded: bool = True) -> list[dict[str, Any]] | None:
    """Tool schemas from a list of dicts or its JSON text, whose nulls stay; None where there are none."""
    if isinstance(value, str):
        padded = False
        try:
            value = read_json(value) if value.strip() else None
        except ValueError as failure:
            raise DataError(f"the tools are not valid JSON: {failure}", key=where()) from failure
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if value is None or (isinstance(value, list) and not value):
        return None
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise DataError("the tools are not a list of schemas", key=where(), got=value)
    return prune(value, padded)


def prune(value: object, padded: bool = True) -> Any:
    """Without the keys whose value is null, if these are ``padded``, at every depth; numpy arrays become lists."""
    if isinstance(value, Mapping):
        return {key: prune(item, padded) for key, item in value.items() if item is not None or not padded}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [prune(item, padded) for item in value]
    return value


def _from_text(text: str, where: Where) -> Any:
    if not text.strip():
        raise DataError("the prompt is an empty string", key=where())
    if text.lstrip().startswith("[{"):
        try:
            return read_json(text)
        except ValueError:
            if "'role':" in text and "'content':" in text:
                fault, fix = "the messages are the text of a Python list, not JSON", "Write them with json.dumps."
                raise DataError(fault, key=where(), got=text[:60], fix=fix) from None
            # a prompt may well begin like JSON without being it
    notice("data.prompt_key", "the prompts are plain strings; each is taken as one user message")
    return [{"role": "user", "content": text}]


def _message(message: Any, number: int, where: Where, media: Sequence[str], padded: bool) -> Message:
    if not isinstance(message, Mapping):
        raise DataError(f"message {number} is not a {{role, content}}", key=where(), got=message)
    clean = prune({name: value for name, value in message.items() if value is not None}, padded)
    role = clean.get("role")
    if not isinstance(role, str) or not role:
        raise DataError(f"message {number} has no role", key=where(), got=message)
    clean["content"] = _content(clean.get("content"), role, number, where, media)
    if not clean.get("tool_calls", True):
        del clean["tool_calls"]
    return clean


def _content(content: Any, role: str, number: int, where: Where, media: Sequence[str]) -> str | list[dict[str, Any]]:
    if content is None and role == "assistant":
        return ""  # only tool calls: templates print None as a word
    if isinstance(content, list) and all(isinstance(part, Mapping) for part in content):
        parts = _parts(content, number, where)
        kinds = {part["type"] for part in parts} - {"text", *media} if isinstance(parts, list) else ()
        for kind in sorted(kinds):
            allowed = ", ".join(("text", *media))
            raise NotBuiltError(f"message {number} has parts of type {kind}", key=where(), allowed=allowed)
        return parts
    if not isinstance(content, str):
        raise DataError(f"the content of message {number} ({role}) is not text", key=where(), got=content)
    return content


def _parts(content: Sequence[Mapping[str, Any]], number: int, where: Where) -> str | list[dict[str, Any]]:
    """A content that is a list of parts, in one form; a text where all parts are."""
    parts: list[dict[str, Any]] = []
    for entry in content:
        part = {name: value for name, value in entry.items() if value is not None}
        written = str(part.get("type") or next((name for name in ("text", *MEDIA) if name in part), ""))
        if written in REFUSED_TYPES:
            raise NotBuiltError(f"message {number} has parts of type {written}, which are not built yet", key=where())
        if written not in PART_TYPES:
            fault = f"message {number} has a part of a type that there is not"
            fix = suggest(written, PART_TYPES)
            raise DataError(fault, key=where(), got=written or part, allowed=list(PART_TYPES), fix=fix)
        kind = PART_TYPES[written]
        if kind == "text":
            parts.append({"type": "text", "text": str(part.get("text", ""))})
        else:
            fields = {name: value for name, value in part.items() if name != "type"}
            is_pixels = any(name in fields for name in MEDIA_NAMES[kind])
            parts.append({"type": kind, **({kind: fields} if is_pixels else fields)})
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts
