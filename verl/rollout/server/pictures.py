"""Images on their way to a server: to a host of this library once for all requests that show them, to others as PNG.

A request to a host names its images. A host that lacks them answers with what its engine reads of them; then they are
sent, and the request is repeated. The samples of a prompt share one transfer. A host that was restarted, or has dropped
images to make room, gets them again.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from PIL import Image

from verl.data.vision.images import MAX_PIXELS
from verl.data.vision.videos import checked_clip
from verl.errors import RolloutError
from verl.json_text import JsonObject
from verl.protocol.codec import Decoder, Encoder, Refused
from verl.rollout.base import PICTURE_FIELDS, Request
from verl.rollout.lost import EngineLostError

T = TypeVar("T")
Post = Callable[[dict[str, Any]], Awaitable[Any]]
NAME, LACKS = "pictures", "lacks"
"""Fields of a request and of its answer: the name of its images; which fields of it the host has to get."""
REMEMBERED = 64
"""Prompts whose images are known by identity."""
KEPT_BYTES = 2 << 30
"""Images that a host keeps; requests in flight hold theirs besides."""
ATTEMPTS = 8
ENVELOPE = 128
"""Bytes of a transfer in JSON around its content and blobs, at most."""
MOST_BYTES = 256 << 20
"""Of a prompt's images and videos in JSON. As the processors of the Qwen family make them, a pixel of an image takes 32
bytes, and a pixel of each frame of a video 16: 8.4 million pixels of images, or 58 frames of 640 x 448.
"""


class ByIdentity(Generic[T]):
    """What was made of objects, for the last `REMEMBERED` of them; they are kept, or their ids would be given again."""

    def __init__(self, make: Callable[..., T]):
        self._make = make
        self._known: OrderedDict[tuple[int, ...], tuple[Any, T]] = OrderedDict()

    def of(self, *objects: Any) -> T:
        key = tuple(map(id, objects))
        if key not in self._known:
            self._known[key] = objects, self._make(*objects)
            if len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return self._known[key][1]

    def drop(self, *objects: object) -> None:
        """Make it again when it is next needed."""
        self._known.pop(tuple(map(id, objects)), None)


class _Shown:
    """The name of images, which no other client can guess, and their last transfer."""

    def __init__(self, *_: Any):
        self.name = uuid.uuid4().hex
        self.transfer: asyncio.Future[Any] | None = None


class PictureSender:
    """The client's side of a host; ``send`` transfers images."""

    def __init__(self, send: Post):
        self._send = send
        self._shown: ByIdentity[_Shown] = ByIdentity(_Shown)

    async def exchange(self, request: Request, payload: dict[str, Any], post: Post) -> JsonObject:
        """The host's answer to a request, once the host has its images.

        Raises:
            EngineLostError: the host drops images before they are used. RolloutError: these images cannot be sent.
        """
        if not request.sees:
            return await post(payload)
        shown = self._shown.of(*(request.images or ()), *(request.videos or ()), request.multi_modal_inputs)
        for _ in range(ATTEMPTS):
            before = shown.transfer
            if before is not None and not before.done():  # one that failed is made again
                await asyncio.shield(before)
            answer = await post({**payload, NAME: shown.name})
            if not isinstance(answer, dict) or LACKS not in answer:
                return answer
            if shown.transfer is before:  # no other request has sent them meanwhile
                shown.transfer = asyncio.ensure_future(self._transfer(shown.name, request, answer[LACKS]))
            assert shown.transfer is not None
            await asyncio.shield(shown.transfer)  # others wait for it, too
        raise EngineLostError(f"the host dropped the images of {request.id} {ATTEMPTS} times before their use")

    async def _transfer(self, name: str, request: Request, fields: Sequence[str]) -> Any:
        return await self._send({NAME: name, **await asyncio.to_thread(pack, request, fields)})


def pack(request: Request, fields: Sequence[str]) -> dict[str, Any]:
    """A request's images as JSON, lossless.

    Args:
        fields: those of `PICTURE_FIELDS` that the engine reads; all, where the request has none of these.

    Raises:
        RolloutError: an image has no encoding, or they are more than `MOST_BYTES`.
    """
    encoder, key = Encoder(images="raw"), f"request {request.id}"
    values = {name: getattr(request, name) for name in PICTURE_FIELDS if getattr(request, name)}
    values = {name: value for name, value in values.items() if name in fields} or values
    try:
        content = encoder.encode({n: dict(v) if isinstance(v, Mapping) else list(v) for n, v in values.items()})
    except Refused as refused:
        raise RolloutError(f"images cannot be sent: {refused.reason}", key=key + refused.path) from refused
    text, blobs = json.dumps(content), list(encoder.blobs())
    size = len(json.dumps(text)) + sum(4 * -(-blob.nbytes // 3) + 4 for blob in blobs) + ENVELOPE
    if size > MOST_BYTES:
        raise RolloutError(
            "the images and videos of one prompt are too large to be sent to a host",
            key=key,
            got=f"{size} bytes",
            allowed=f"{MOST_BYTES} bytes",
            fix="Set max_pixels, or max_frames for videos, lower in data.mm_processor_kwargs.",
        )
    return {"content": text, "blobs": [base64.b64encode(blob.data).decode() for blob in blobs]}


def unpack(payload: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """The fields of a request that `pack` encoded, and their bytes.

    Raises:
        RolloutError: it is something else, or has more than `MAX_PIXELS` pixels.
    """
    try:
        blobs = [np.frombuffer(base64.b64decode(blob, validate=True), np.uint8) for blob in payload["blobs"]]
        fields = Decoder(blobs, MAX_PIXELS).decode(payload["content"])
        images, videos, inputs = (fields.pop(name, None) for name in PICTURE_FIELDS)
        tensors = list(dict(inputs or {}).values())
        frames = [*(images or ()), *(frame for clip in videos or () for frame in checked_clip(clip)["frames"])]
        if fields or not (frames or inputs) or not all(isinstance(frame, Image.Image) for frame in frames):
            raise ValueError(f"allowed are {', '.join(PICTURE_FIELDS)}")
        if not all(type(tensor) is torch.Tensor and tensor.isfinite().all() for tensor in tensors):
            raise ValueError("multi_modal_inputs are tensors of finite numbers")
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise RolloutError(f"not the images of a request: {type(error).__name__}: {error}", key=NAME) from error
    size = sum(4 * image.width * image.height for image in frames) + sum(tensor.nbytes for tensor in tensors)
    return {"images": images, "videos": videos, "multi_modal_inputs": inputs}, size


class PictureStore:
    """The host's side: images by name. Those that were not used for the longest time leave beyond `KEPT_BYTES`."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[dict[str, Any], int]] = OrderedDict()

    async def add(self, payload: Mapping[str, Any]) -> None:
        """Take what a client sends.

        Raises:
            RolloutError: as in `unpack`, or it has no name.
        """
        name = _name_of(payload.get(NAME))
        self._kept[name] = await asyncio.to_thread(unpack, payload)  # decoding takes seconds
        while len(self._kept) > 1 and sum(size for _, size in self._kept.values()) > KEPT_BYTES:
            self._kept.popitem(last=False)

    def of(self, name: Any) -> dict[str, Any] | None:
        """The fields of a request; None if they have to be sent."""
        if _name_of(name) not in self._kept:
            return None
        self._kept.move_to_end(name)
        return self._kept[name][0]


def _name_of(name: Any) -> str:
    if not isinstance(name, str) or not name:
        raise RolloutError("images have a name", key=NAME, got=name, allowed="a text that is not empty")
    return name


def png_url(image: Image.Image) -> str:
    """A data URL, for servers that read images themselves; lossless."""
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
