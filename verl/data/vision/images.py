"""One image, in any form in which a row, a tool or a client gives it, as RGB; what is hostile or broken is refused.

A file is opened for its header first: kind and size are checked before any pixel is decoded. Only the formats of
photographs and screenshots are read; others that Pillow knows run programs (EPS) or hold no pixels. Nothing is fetched
from the network unless a setting allows it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image, ImageOps, UnidentifiedImageError

from verl.data.messages import IMAGE_NAMES
from verl.data.settings import read, read_mapping, read_number
from verl.errors import DataError
from verl.metrics import notice
from verl.storage import expand

if TYPE_CHECKING:
    from verl.config.schema.node import SettingsSource

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
MAX_PIXELS = 50_000_000
"""Pixels of an image that is decoded, where no setting says otherwise: 150 MB as RGB."""
MAX_RATIO = 200
"""Longer edge over shorter: processors of the Qwen family refuse more."""
MAX_BYTES = 200_000_000
FETCH_SECONDS = 20.0
BROKEN = (OSError, ValueError, SyntaxError, EOFError, IndexError, Image.DecompressionBombError)
"""What Pillow raises for a file that is damaged; the last one for pictures that grow behind the first, too."""
FORMS = {
    "image": "{bytes}, {path}, a path, a data URL, an image_url part, or a PIL image",
    "video": "a list of frames, {video}, {bytes}, {path}, a path, a data URL, or a video_url part",
}


@dataclass(frozen=True)
class ImageLimits:
    """What is decoded, and the size that it is brought to.

    Args:
        decoded: most pixels of an image as it is stored; more is refused before it is decoded.
        remote: whether http(s) addresses are fetched.
        min_pixels, max_pixels: pixels of an image as the model sees it, where the image does not name its own.
    """

    decoded: int = MAX_PIXELS
    remote: bool = False
    min_pixels: int | None = None
    max_pixels: int | None = None

    @classmethod
    def of(cls, config: SettingsSource) -> ImageLimits:
        """From the ``data`` section."""
        sizes = read_mapping(config, "mm_processor_kwargs")
        least, most = (None if sizes.get(name) is None else int(sizes[name]) for name in ("min_pixels", "max_pixels"))
        allowed = bool(read(config, "allow_remote_images", False))
        return cls(read_number(config, "max_image_pixels", MAX_PIXELS), allowed, least, most)


def open_image(
    value: object,
    where: str,
    limits: ImageLimits,
    formats: tuple[str, ...] = FORMATS,
    what: str = "an image, or damaged at its beginning",
) -> Image.Image:
    """The image with its header read; `load_image` decodes it.

    Args:
        value: an image in one of these forms: ``{"bytes": ...}``, ``{"path": ...}``, ``{"image": ...}``, OpenAI's
            ``{"image_url": {"url": ...}}``, bytes, a path, a ``file://`` or ``data:`` URL, a PIL image.
        where: names the image in messages.
        formats: kinds of files that are read.
        what: the file is not, where it is of another kind.

    Raises:
        DataError: none of these forms, no such file, an address where none may be fetched, not an image of `FORMATS`,
            broken, or larger than the limits.
    """
    if isinstance(value, Mapping):
        value = _inside(value, where)
    source = value if isinstance(value, Image.Image) else open_source(value, where, limits)
    if isinstance(source, Image.Image):
        image = source
    else:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # our own limit is below it
                image = Image.open(source, formats=formats)
        except UnidentifiedImageError as failure:
            raise DataError(f"not {what}", key=where, got=shown(value), allowed=", ".join(formats)) from failure
        except BROKEN as failure:
            raise DataError(f"the image cannot be read: {failure}", key=where, got=shown(value)) from failure
    check_size(image, where, limits)
    return image


def load_image(value: object, where: str, limits: ImageLimits) -> Image.Image:
    """The image decoded, upright, in RGB, and within its ``min_pixels`` and ``max_pixels``.

    Transparent places become white. Of an animation the first picture is taken, with a notice.

    Args:
        value: as in `open_image`; a mapping may name its own ``min_pixels`` and ``max_pixels``.

    Raises:
        DataError: as in `open_image`, or it is damaged further on.
    """
    image = open_image(value, where, limits)
    try:
        if getattr(image, "n_frames", 1) > 1:
            notice("images", f"{where} has several pictures; the first is taken")
        image = _rgb(ImageOps.exif_transpose(image))
    except BROKEN as failure:
        raise DataError(f"the image is damaged: {failure}", key=where, got=shown(value)) from failure
    width, height = fitted_size(image.size, *pixel_range(value, where, limits))
    return image if (width, height) == image.size else image.resize((width, height), Image.Resampling.BICUBIC)


def pixel_range(value: object, where: str, limits: ImageLimits) -> tuple[int | None, int | None]:
    """(min_pixels, max_pixels) of an image: its own, else those of the settings.

    Raises:
        DataError: not whole numbers above 0, or the lower one is the larger.
    """
    entry = value if isinstance(value, Mapping) else {}
    bounds: list[int | None] = []
    for name, default in (("min_pixels", limits.min_pixels), ("max_pixels", limits.max_pixels)):
        number = default if entry.get(name) is None else entry[name]
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
            raise DataError("not a number of pixels", key=f"{where}, {name}", got=number, allowed="1, 2, ...")
        bounds.append(number)
    least, most = bounds
    if least is not None and most is not None and least > most:
        raise DataError("min_pixels is above max_pixels", key=where, got=f"{least} and {most}")
    if least is not None and least > limits.decoded:
        allowed = f"at most {limits.decoded} (data.max_image_pixels)"
        raise DataError("min_pixels is above the limit", key=where, got=least, allowed=allowed)
    return least, most


def fitted_size(size: tuple[int, int], least: int | None, most: int | None) -> tuple[int, int]:
    """(width, height) with the same proportions, and between ``least`` and ``most`` pixels."""
    width, height = size
    area, scale = width * height, 1.0
    if most is not None and area > most:
        scale = math.sqrt(most / area)
        return max(1, math.floor(width * scale)), max(1, math.floor(height * scale))
    if least is not None and area < least:
        scale = math.sqrt(least / area)
    return (width, height) if scale == 1.0 else (math.ceil(width * scale), math.ceil(height * scale))


def upright_size(image: Image.Image) -> tuple[int, int]:
    """(width, height) as `load_image` gives them before it resizes: a photograph may be stored lying on its side."""
    exif = Image.Image.getexif(image)  # that of the class for PNG decodes all of it
    lying = exif.get(0x0112, 1) in (5, 6, 7, 8)
    return (image.height, image.width) if lying else image.size


def thumbnails(images: Sequence[Image.Image], edge: int = 128, most: int = 8) -> bytes:
    """A PNG file of images side by side, each with a longer edge of at most ``edge`` pixels; the first ``most``."""
    small = []
    for image in images[:most]:
        small.append(image.convert("RGB"))
        small[-1].thumbnail((edge, edge))  # a copy was made of an image that is RGB, too
    strip = Image.new("RGB", (sum(im.width for im in small), max(im.height for im in small)), "white")
    at = 0
    for im in small:
        strip.paste(im, (at, 0))
        at += im.width
    file = io.BytesIO()
    strip.save(file, "PNG")
    return file.getvalue()


def describe_image(image: Image.Image) -> str:
    """``image 56x56 sha256:1f0c0a7b``: its size and a digest of its pixels, for dumps and tables."""
    digest = hashlib.sha256(f"{image.mode} {image.size}".encode() + image.tobytes()).hexdigest()
    return f"image {image.width}x{image.height} sha256:{digest[:8]}"


def open_source(value: object, where: str, limits: ImageLimits, kind: str = "image") -> io.BytesIO | Path:
    """Bytes, a path or an address as what is to be opened.

    Args:
        kind: of the file, for messages.

    Raises:
        DataError: none of these, no such file, or an address where none may be fetched.
    """
    if isinstance(value, (bytes, bytearray, memoryview)):
        return io.BytesIO(bytes(value))
    if isinstance(value, Path):
        value = str(value)
    if not isinstance(value, str) or not value:
        raise DataError(
            f"not {'a' if kind == 'video' else 'an'} {kind}", key=where, got=shown(value), allowed=FORMS[kind]
        )
    if value.startswith("data:"):
        return io.BytesIO(_of_data_url(value, where))
    if value.startswith(("http://", "https://")):
        return io.BytesIO(_fetched(value, where, limits, kind))
    path = Path(expand(value.removeprefix("file://")))
    if not path.is_file():
        raise DataError(f"no such {kind}", key=where, got=str(path), fix="A path is relative to where the run starts.")
    return path


def _inside(value: Mapping[str, Any], where: str) -> Any:
    """The image of a mapping: its bytes if it has both bytes and a path, as the hub's data sets do."""
    for name in IMAGE_NAMES:
        inner = value.get(name)
        if inner is None or (isinstance(inner, (bytes, str)) and not inner):
            continue
        return _inside(inner, where) if isinstance(inner, Mapping) else inner
    raise DataError("an image without bytes and without a path", key=where, got=sorted(value), allowed=FORMS["image"])


def _of_data_url(text: str, where: str) -> bytes:
    head, comma, body = text.partition(",")
    if not comma or not head.endswith(";base64"):
        allowed = "data:image/png;base64,..."
        raise DataError("a data URL that is not in base64", key=where, got=head[:60], allowed=allowed)
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as failure:
        raise DataError(f"a data URL that is damaged: {failure}", key=where, got=head[:60]) from failure


def _fetched(url: str, where: str, limits: ImageLimits, kind: str) -> bytes:
    if not limits.remote:
        raise DataError(
            f"{kind}s are not fetched from the network",
            key=where,
            got=url,
            fix="Save them next to the data, or set data.allow_remote_images=true.",
        )
    from urllib.request import Request, urlopen

    try:
        with urlopen(Request(url, headers={"User-Agent": "verl"}), timeout=FETCH_SECONDS) as answer:
            body = answer.read(MAX_BYTES + 1)
    except (OSError, ValueError) as failure:
        raise DataError(f"the {kind} could not be fetched: {failure}", key=where, got=url) from failure
    if len(body) > MAX_BYTES:
        raise DataError(f"the {kind} has more than {MAX_BYTES} bytes", key=where, got=url)
    return body


def check_size(image: Image.Image, where: str, limits: ImageLimits) -> None:
    """Raise a `DataError` for more pixels than the limit, or an edge that is too long for the other."""
    width, height = image.size
    if width * height > limits.decoded:
        raise DataError(
            f"the image has {width} x {height} pixels, more than data.max_image_pixels={limits.decoded}",
            key=where,
            fix="Make it smaller, or set data.max_image_pixels higher.",
        )
    if max(width, height) > MAX_RATIO * min(width, height):
        fault = f"the image has {width} x {height} pixels: one edge is over {MAX_RATIO} times the other"
        raise DataError(fault, key=where)


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):
        return image.point(lambda value: value / 256).convert("L").convert("RGB")
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        above = image.convert("RGBA")
        below = Image.new("RGBA", above.size, "white")
        return Image.alpha_composite(below, above).convert("RGB")
    return image.convert("RGB")


def shown(value: object) -> str:
    """What was given, short enough for a message."""
    if isinstance(value, (bytes, bytearray)):
        return f"{len(value)} bytes"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {shown(inner)}" for name, inner in value.items() if inner is not None) + "}"
    text = value if isinstance(value, str) else type(value).__name__
    return text if len(text) <= 120 else text[:100] + "..."
