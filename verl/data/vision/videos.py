"""One video, in any form in which a row gives it, as the frames that the model sees; hostile and broken ones fail.

Rate, size and number of frames are read first, and only the frames that are shown become pictures. Animations are read
by Pillow. Other files need PyAV, and are opened as the container that their first bytes name: FFmpeg left to guess
follows playlists to other files and hosts.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, cast

import numpy as np
from PIL import Image

from verl.data.messages import VIDEO_NAMES
from verl.data.settings import read_mapping, read_number
from verl.data.vision.images import (
    BROKEN,
    ImageLimits,
    check_size,
    fitted_size,
    load_image,
    open_image,
    open_source,
    pixel_range,
    shown,
    upright_size,
)
from verl.errors import DataError, NotBuiltError

if TYPE_CHECKING:
    from av.container import InputContainer

    from verl.config.schema.node import SettingsSource

ANIMATIONS = ("GIF", "WEBP", "PNG")
CONTAINERS = {b"ftyp": (4, "mp4"), b"\x1a\x45\xdf\xa3": (0, "matroska"), b"AVI ": (8, "avi")}
"""First bytes of files that PyAV reads: where they are, and the demuxer."""
SAMPLING = ("fps", "nframes", "min_frames", "max_frames")
ENTRY = (*SAMPLING, "sample_fps", "min_pixels", "max_pixels")
"""What an entry says besides where its video is; the names of qwen-vl-utils, which upstream's rows use."""
FPS, FEWEST, MOST = 2.0, 4, 768
"""Frames per second, and fewest and most frames of a video, where nothing says otherwise: those of qwen-vl-utils."""
MOST_DECODED = 10_000_000_000
"""Pixels of all frames of a file: those between the frames that are shown are decoded, too, at about 100 million pixels
per second. Six minutes of 1280 x 720 at 30 frames per second have as many.
"""


class VideoClip(TypedDict):
    """The frames of a video that a model sees, in a form that travels as a row's column.

    Args:
        frames: RGB, of one size.
        indices: their numbers in the source.
        fps: frames per second of the source.
        total: frames of the source.
    """

    frames: Sequence[Image.Image]
    indices: Sequence[int]
    fps: float
    total: int


ClipShape = tuple[tuple[int, int], tuple[int, ...], float, int]
"""(width, height), indices, frames per second and frames of the source: what the tokens of a clip depend on."""


@dataclass(frozen=True)
class VideoLimits:
    """How many frames are read of a video, and what its pictures are brought to.

    Args:
        images: limits of each frame; ``images.decoded`` also bounds the pixels of all frames that are shown.
        fps, min_frames, max_frames: where a row does not say.
        most: frames of one video, whatever a row says.
    """

    images: ImageLimits = field(default_factory=ImageLimits)
    fps: float = FPS
    min_frames: int = FEWEST
    max_frames: int = MOST
    most: int = MOST

    @classmethod
    def of(cls, config: SettingsSource) -> VideoLimits:
        """From the ``data`` section."""
        rates, most = read_mapping(config, "mm_processor_kwargs"), read_number(config, "max_video_frames", MOST)
        entry = {name: value for name, value in rates.items() if name in ("fps", "min_frames", "max_frames")}
        numbers = _numbers(entry, "data.mm_processor_kwargs")
        return cls(ImageLimits.of(config), **{"max_frames": most, **numbers}, most=most)


def clip_shape(clip: VideoClip) -> ClipShape:
    """What the tokens of a clip depend on."""
    return clip["frames"][0].size, tuple(clip["indices"]), float(clip["fps"]), int(clip["total"])


def checked_clip(value: object) -> VideoClip:
    """A clip that came over a wire.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(value, dict) or set(value) != set(VideoClip.__annotations__) or not value["frames"]:
        raise ValueError(f"a video has {', '.join(VideoClip.__annotations__)}")
    if len(value["frames"]) != len(value["indices"]) or not float(value["fps"]) > 0:
        raise ValueError("a video has as many indices as frames, and frames per second")
    return cast(VideoClip, value)


def describe_clip(clip: VideoClip) -> str:
    """``video 8x56x56``: frames, width and height."""
    (width, height), indices, _, _ = clip_shape(clip)
    return f"video {len(indices)}x{width}x{height}"


def open_video(value: object, where: str, limits: VideoLimits, step: int = 1) -> ClipShape:
    """The shape that `load_video` gives a video, from its header.

    Args:
        value: a list of frames, each in a form of `load_image`; ``{"video": ...}``, ``{"bytes": ...}``,
            ``{"path": ...}``, OpenAI's ``{"video_url": {"url": ...}}``, bytes, a path, a ``file://`` or ``data:`` URL
            of a file. A mapping may name ``fps``, ``nframes``, ``min_frames``, ``max_frames``, ``sample_fps`` (frames
            per second of a list), ``min_pixels`` and ``max_pixels`` (of each frame).
        where: names the video in messages.
        step: frames that the tower joins; their number is rounded down to a multiple.

    Raises:
        DataError: none of these forms, no such file, too many frames or pixels, or broken.
        NotBuiltError: no installed package reads such a file.
    """
    source, size, indices = _measured(value, where, limits, step)
    return size, indices, source.fps, source.total


def load_video(value: object, where: str, limits: VideoLimits, step: int = 1) -> VideoClip:
    """The frames of a video, RGB and within ``min_pixels`` and ``max_pixels``; arguments and errors as `open_video`."""
    source, size, indices = _measured(value, where, limits, step)
    frames = [
        frame if frame.size == size else frame.resize(size, Image.Resampling.BICUBIC) for frame in source.read(indices)
    ]
    if len(frames) < len(indices):
        fault = f"the video is damaged, or shorter than its header says: it lacks frame {indices[len(frames)]}"
        raise DataError(fault, key=where)
    return VideoClip(frames=frames, indices=indices, fps=source.fps, total=source.total)


@dataclass
class VideoSource(ABC):
    """An opened video.

    Args:
        size: width and height of its frames.
    """

    where: str
    limits: ImageLimits
    total: int
    fps: float
    size: tuple[int, int]

    @abstractmethod
    def read(self, indices: Sequence[int]) -> Iterator[Image.Image]:
        """The frames of these ascending numbers, RGB; fewer where the file ends before."""


@dataclass
class ListedFrames(VideoSource):
    """Frames that are images."""

    frames: Sequence[Any]

    def read(self, indices: Sequence[int]) -> Iterator[Image.Image]:
        for index in indices:
            place = f"{self.where}, frame {index}"
            frame = load_image(self.frames[index], place, self.limits)
            if frame.size != self.size:
                raise DataError("the frames of a video have one size", key=place, got=frame.size, allowed=self.size)
            yield frame


@dataclass
class Animation(VideoSource):
    """A file of several pictures, with the rate of its first one."""

    image: Image.Image

    def read(self, indices: Sequence[int]) -> Iterator[Image.Image]:
        for index in indices:
            place = f"{self.where}, frame {index}"
            try:
                self.image.seek(index)
                check_size(self.image, place, self.limits)  # pictures of a GIF may be larger than its first
                picture = self.image.convert("RGBA")
            except DataError:
                raise
            except Image.DecompressionBombError as failure:
                raise DataError(f"the picture cannot be read: {failure}", key=place) from failure
            except BROKEN:
                return
            yield load_image(picture, place, self.limits)


@dataclass
class DecodedFile(VideoSource):
    """A file that PyAV reads."""

    container: InputContainer

    def read(self, indices: Sequence[int]) -> Iterator[Image.Image]:
        from av.error import FFmpegError

        shown_ones = set(indices)
        with self.container, contextlib.suppress(FFmpegError):
            for number, frame in zip(range(indices[-1] + 1), self.container.decode(video=0)):
                if frame.width * frame.height > self.limits.decoded:
                    raise _too_large(self.where, (frame.width, frame.height), self.limits)
                if number in shown_ones:
                    yield frame.to_image()


def _measured(
    value: Any, where: str, limits: VideoLimits, step: int
) -> tuple[VideoSource, tuple[int, int], tuple[int, ...]]:
    """A video, and size and numbers of the frames that are shown."""
    entry, source = _source(value, where, limits)
    size = fitted_size(source.size, *pixel_range(entry, where, limits.images))
    indices = _sampled(source, entry, where, limits, step)
    if len(indices) * size[0] * size[1] > limits.images.decoded:
        raise DataError(
            f"{len(indices)} frames of {size[0]} x {size[1]} pixels are more than "
            f"data.max_image_pixels={limits.images.decoded} together",
            key=where,
            fix="Set max_frames or max_pixels lower in data.mm_processor_kwargs.",
        )
    return source, size, indices


def _source(value: Any, where: str, limits: VideoLimits) -> tuple[dict[str, Any], VideoSource]:
    """What a row says of a video, and the video with its header read."""
    entry: dict[str, Any] = {}
    while isinstance(value, Mapping):
        entry |= {name: inner for name, inner in value.items() if inner is not None}
        named = [entry.pop(name, None) for name in VIDEO_NAMES]
        value = next(
            (one for one in named if one is not None and not (isinstance(one, (str, bytes)) and not one)), None
        )
    entry.pop("type", None)
    strange = sorted(set(entry) - set(ENTRY))
    if strange:
        raise DataError("a video has no such setting", key=where, got=strange[0], allowed=ENTRY)
    numbers = {**entry, **_numbers({name: entry[name] for name in (*SAMPLING, "sample_fps") if name in entry}, where)}
    if isinstance(value, np.ndarray):
        value = list(value)
    if isinstance(value, (list, tuple)):
        return numbers, _of_list(value, numbers, where, limits.images)
    source = open_source(value, where, limits.images, "video")
    return numbers, _of_file(source, where, limits.images, shown(value))


def _of_list(frames: Sequence[Any], entry: Mapping[str, Any], where: str, limits: ImageLimits) -> VideoSource:
    if not frames:
        raise DataError("a video without frames", key=where)
    first = open_image(frames[0], f"{where}, frame 0", limits)
    size = fitted_size(upright_size(first), *pixel_range(frames[0], where, limits))
    return ListedFrames(where, limits, len(frames), float(entry.get("sample_fps", FPS)), size, frames)


def _of_file(source: io.BytesIO | Path, where: str, limits: ImageLimits, named: str) -> VideoSource:
    with source.open("rb") if isinstance(source, Path) else io.BytesIO(source.getvalue()) as file:
        head = file.read(12)
    kinds = [kind for mark, (at, kind) in CONTAINERS.items() if head[at : at + len(mark)] == mark]
    if not kinds:
        content = source if isinstance(source, Path) else source.getvalue()
        image = open_image(content, where, limits, ANIMATIONS, "a video, or damaged at its beginning")
        try:
            total = int(getattr(image, "n_frames", 1))
            image.load()  # of a WebP, the rate is known only then
        except BROKEN as failure:
            raise DataError(f"the video is damaged: {failure}", key=where, got=named) from failure
        _check_total(total, image.size, where, named)
        return Animation(where, limits, total, 1000 / (image.info.get("duration") or 100), image.size, image)
    if importlib.util.find_spec("av") is None:
        fix = "pip install av, or give the frames of the video as a list of images."
        raise NotBuiltError("files of videos are read by PyAV, which is not installed", key=where, got=named, fix=fix)
    import av

    try:
        container = av.open(f"file:{source}" if isinstance(source, Path) else source, "r", format=kinds[0])
        stream = container.streams.video[0]
        fps = float(stream.average_rate or 0)
        total = stream.frames or int(_seconds(container) * fps)
        size = stream.codec_context.width, stream.codec_context.height
    except (av.error.FFmpegError, IndexError, ValueError) as failure:
        raise DataError(f"the video cannot be read: {failure}", key=where, got=named) from failure
    if total < 1 or fps <= 0 or min(size) < 1:
        raise DataError("a video without frames, or of unknown rate", key=where, got=named)
    if size[0] * size[1] > limits.decoded:
        raise _too_large(where, size, limits)
    _check_total(total, size, where, named)
    return DecodedFile(where, limits, total, fps, size, container)


def _seconds(container: InputContainer) -> float:
    """Of the pictures: sound may be longer, so the duration of the container comes last."""
    import av

    stream = container.streams.video[0]
    unit = float(stream.time_base or 0)
    if stream.duration is not None:
        return stream.duration * unit
    end = re.fullmatch(r"(\d+):(\d+):(\d+\.?\d*)", stream.metadata.get("DURATION", ""))  # Matroska has a tag
    if end is None:
        return (container.duration or 0) / av.time_base
    hours, minutes, seconds = map(float, end.groups())
    return 3600 * hours + 60 * minutes + seconds - (stream.start_time or 0) * unit


def _check_total(total: int, size: tuple[int, int], where: str, named: str) -> None:
    if total * size[0] * size[1] > MOST_DECODED:
        fault = f"{total} frames of {size[0]} x {size[1]} pixels in a file are more than {MOST_DECODED:,} together"
        raise DataError(fault, key=where, got=named, fix="Cut the video, or store it with smaller or fewer frames.")


def _too_large(where: str, size: tuple[int, int], limits: ImageLimits) -> DataError:
    fault = f"a frame has {size[0]} x {size[1]} pixels, more than data.max_image_pixels={limits.decoded}"
    return DataError(fault, key=where, fix="Store smaller frames, or set data.max_image_pixels higher.")


def _sampled(
    source: VideoSource, entry: Mapping[str, Any], where: str, limits: VideoLimits, step: int
) -> tuple[int, ...]:
    """The numbers of the frames that are shown, from the first to the last at equal distances.

    A list of frames is shown as it is, unless its entry says how it is sampled.
    """
    if isinstance(source, ListedFrames) and not any(name in entry for name in SAMPLING):
        count = source.total
    elif "nframes" in entry:
        count = min(entry["nframes"], source.total)
    else:
        fewest, most = entry.get("min_frames", limits.min_frames), entry.get("max_frames", limits.max_frames)
        if fewest > most:
            raise DataError("min_frames is above max_frames", key=where, got=f"{fewest} and {most}")
        wished = source.total / source.fps * entry.get("fps", limits.fps)
        count = int(min(max(wished, fewest), most, source.total))
    if not isinstance(source, ListedFrames) or count < source.total:
        count = max(count // step * step, min(step, source.total))
    if count > limits.most:
        raise DataError(
            f"the video has {count} frames, more than data.max_video_frames={limits.most}",
            key=where,
            fix="Set a lower fps or max_frames, or data.max_video_frames higher.",
        )
    return tuple(np.linspace(0, source.total - 1, count).round().astype(int).tolist())


def _numbers(entry: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Rates as finite numbers above 0, counts as integers."""
    made: dict[str, Any] = {}
    for name, value in entry.items():
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        is_count = not name.endswith("fps")
        if isinstance(value, bool) or not 0 < number < math.inf or (is_count and number != int(number)):
            allowed = "1, 2, ..." if is_count else "a number above 0"
            raise DataError("not a number of frames", key=f"{where}, {name}", got=value, allowed=allowed)
        made[name] = int(number) if is_count else number
    return made
