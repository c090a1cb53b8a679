"""A model's processor: pixels to tensors, and one placeholder of the prompt to the tokens of an image or a video.

transformers builds processors of vision models with their video processor, which needs torchvision; without it
`AutoProcessor` returns only the tokenizer, without an error. Without torchvision the processor is therefore built here,
with `FrameProcessor` for videos.

Prompts are tokenised with one placeholder per image or video, by the code that keeps special tokens of the data text,
and expanded as ids: what `AutoProcessor` would do in text, with the same tokens.
"""

from __future__ import annotations

import importlib.util
import inspect
import shutil
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image

from verl.config.machine.models import SEEN, TEXT_TOO
from verl.config.schema.node import full_keys
from verl.data.tokenizer import PROCESSOR_FILES, brief, source_of
from verl.data.vision.frames import FrameProcessor
from verl.data.vision.videos import ClipShape, VideoClip, clip_shape
from verl.errors import ConfigError, DataError, ModelError, NotBuiltError, suggest
from verl.json_text import read_json

if TYPE_CHECKING:
    from verl.protocol.tokenizer import Tokenizer

Inputs = dict[str, torch.Tensor]
"""What a processor makes of the images and videos of one row, by the names of the model's arguments."""
Pieces = dict[str, list[list[int]]]
"""Kind -> of each image or video in order, the ids that stand for it in the prompt."""
TEXT_NAMES = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "video_metadata")
"""What a processor makes of the text."""
OF_IMAGES = ("image_processor_type", "image_processor", "processor_class", "image_mean", "patch_size", "auto_map")
"""What a processor's files have if it takes images; those for sounds alone have none of it."""
OWN_SIZES = ("min_pixels", "max_pixels", "fps", "min_frames", "max_frames")
"""Arguments that are applied before the processor, so that samplers get the same pictures (`VideoLimits`)."""


REMEMBERED = 256
"""Sizes of images and shapes of videos whose ids are kept: one of a long video has 100,000 ids."""


class VisionProcessor:
    """A processor of transformers, and what rows of images and videos need of it.

    Everything else (``processor(text=..., images=...)``, ``image_processor``, ``apply_chat_template``) is that of the
    processor of transformers, ``wrapped``.

    Attributes:
        placeholder, placeholder_id: what a chat template writes once for each image.
        placeholder_ids: id that a chat template writes once for each image or video -> kind.
        image_token_ids: ids that stand for parts of images and videos in expanded prompts.
        frames_per_token: frames of a video that the tower joins.

    Args:
        wrapped: a processor of transformers with an image processor and a tokenizer.
        folder: where its files are; None for one that has none.
        call: further arguments of each call (``data.mm_processor_kwargs``).
    """

    def __init__(self, wrapped: Any, folder: Path | None = None, call: Mapping[str, Any] | None = None):
        self.wrapped, self.folder = wrapped, folder
        self.call = _checked_arguments(wrapped, call or {})
        self.placeholders = {"image": str(wrapped.image_token)}
        videos = getattr(wrapped, "video_processor", None)
        if videos is not None and getattr(wrapped, "video_token", None):
            self.placeholders["video"] = str(wrapped.video_token)
        self.frames_per_token = int(getattr(videos, "temporal_patch_size", None) or 1)
        self.placeholder = self.placeholders["image"]
        self.placeholder_id = int(wrapped.tokenizer.convert_tokens_to_ids(self.placeholder))
        unknown, self.placeholder_ids = wrapped.tokenizer.unk_token_id, dict[int, str]()
        for kind, token in self.placeholders.items():
            number = int(wrapped.tokenizer.convert_tokens_to_ids(token))
            if number == unknown or number < 0:
                raise ModelError(
                    f"the tokenizer has no token {token!r}, which stands for {'an' if kind == 'image' else 'a'} {kind}",
                    got=str(folder),
                )
            self.placeholder_ids[number] = kind
        of_images = getattr(wrapped.tokenizer, "image_token_id", None)
        self.image_token_ids = frozenset({*self.placeholder_ids, *(() if of_images is None else (int(of_images),))})
        self._pieces: dict[Any, list[int]] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "wrapped":
            raise AttributeError(name)  # a copy under construction has no processor yet
        return getattr(self.wrapped, name)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.wrapped(*arguments, **named)

    def with_arguments(self, call: Mapping[str, Any]) -> VisionProcessor:
        """The same processor, called with these arguments.

        Raises:
            ConfigError: it takes no argument of such a name.
        """
        return VisionProcessor(self.wrapped, self.folder, call) if dict(call) != self.call else self

    def process(self, media: Sequence[Image.Image | VideoClip], where: str = "images") -> tuple[Inputs, Pieces]:
        """The tensors of a row's images and videos, and for each the ids that stand for it in the prompt.

        Args:
            media: RGB, in the order of the prompt; none gives no tensors.
            where: names the row in messages.

        Returns:
            ``pixel_values`` (patches, dim) and ``image_grid_thw`` (images, 3) in the Qwen family; others have others.

        Raises:
            DataError: the processor refuses an image or a video, or takes no videos.
        """
        made: list[Inputs] = []
        pieces: Pieces = {"image": [], "video": []}
        for one in media:
            kind = "image" if isinstance(one, Image.Image) else "video"
            place = f"{where}, {kind} {len(pieces[kind])}"
            if isinstance(one, Image.Image):
                inputs, ids = self._one(one, place)
            else:
                frames = np.stack([np.asarray(frame.convert("RGB")) for frame in one["frames"]])
                inputs, ids = self._clip(clip_shape(one), frames, place)
            made.append(inputs)
            pieces[kind].append(ids)
        return join_inputs(made), pieces

    def piece(self, size: tuple[int, int], where: str = "images") -> list[int]:
        """The ids that stand for an image of this (width, height): they depend on nothing else."""
        return self._remembered(size, lambda: self._one(Image.new("RGB", size), where)[1])

    def clip_piece(self, shape: ClipShape, where: str = "videos") -> list[int]:
        """The ids that stand for a video of this shape: they depend on nothing else."""
        (width, height), indices = shape[:2]
        blank = np.broadcast_to(np.uint8(0), (len(indices), height, width, 3))  # of one byte
        return self._remembered(shape, lambda: self._clip(shape, blank, where, "meta")[1])

    def pieces(self, images: Sequence[Image.Image], videos: Sequence[VideoClip] = ()) -> Pieces:
        """Of each image and video, the ids that stand for it."""
        of_videos = [self.clip_piece(clip_shape(clip)) for clip in videos]
        return {"image": [self.piece(image.size) for image in images], "video": of_videos}

    def check_videos(self, where: str) -> None:
        """Raise a `DataError` where the model takes no videos."""
        if "video" not in self.placeholders:
            fix = "Use a model whose processor takes videos, or give some of the frames as images."
            raise DataError("the model takes images and no videos", key=where, fix=fix)

    def expand(self, ids: Sequence[int], pieces: Pieces) -> list[int]:
        """The ids with each placeholder replaced by its piece, in order.

        Raises:
            DataError: there are not as many placeholders as pieces.
        """
        return self.expand_with(ids, pieces, [0] * len(ids))[0]

    def expand_with(self, ids: Sequence[int], pieces: Pieces, mask: Sequence[int]) -> tuple[list[int], list[int]]:
        """The same, with a mask of the ids that is 0 on images and videos."""
        kinds = [self.placeholder_ids.get(int(number), "") for number in ids]
        for kind, placeholder in self.placeholders.items():
            written, needed = kinds.count(kind), len(pieces.get(kind, ()))
            if written != needed:
                raise DataError(
                    f"the chat template writes {written} placeholders ({placeholder}) for {needed} {kind}s",
                    fix=f"Set custom_chat_template in the model's section to a template that takes {kind} parts.",
                )
        waiting = {kind: iter(of_kind) for kind, of_kind in pieces.items()}
        expanded, masked, seams = list[int](), list[int](), set[int]()
        for number, kind, keep in zip(ids, kinds, mask):
            piece = next(waiting[kind]) if kind else None
            expanded += [int(number)] if piece is None else list(piece)
            masked += [int(keep)] if piece is None else [0] * len(piece)
            if piece is not None:
                seams |= {len(expanded) - len(piece), len(expanded)}
        for seam in sorted(seams, reverse=True):
            self._close(expanded, masked, seam)
        return expanded, masked

    def _close(self, ids: list[int], mask: list[int], seam: int) -> None:
        """Line breaks on both sides of a seam become the tokens that they are in one text.

        Gemma 3 writes line breaks around an image, and its tokenizer has tokens for several of them.
        """
        start = end = seam
        while start and self._is_break(ids[start - 1]):
            start -= 1
        while start < seam and end < len(ids) and self._is_break(ids[end]):
            end += 1
        if start < seam < end:
            text = "".join(self.wrapped.tokenizer.decode([number]) for number in ids[start:end])
            joined = self.wrapped.tokenizer.encode(text, add_special_tokens=False)
            ids[start:end], mask[start:end] = joined, [min(mask[start:end])] * len(joined)

    def _is_break(self, number: int) -> bool:
        return bool(text := self.wrapped.tokenizer.decode([number])) and not text.strip("\n")

    def save_pretrained(self, folder: str | Path) -> None:
        """Copy the processor's files into a folder, as the model's own folder has them."""
        if self.folder is None:
            self.wrapped.save_pretrained(folder)
            return
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name in PROCESSOR_FILES:
            if (self.folder / name).is_file():
                shutil.copyfile(self.folder / name, Path(folder) / name)

    def _one(self, image: Image.Image, where: str) -> tuple[Inputs, list[int]]:
        return self._call(
            "image", f"{image.width} x {image.height}", where, images=[image], images_kwargs=dict(self.call)
        )

    def _remembered(self, key: Hashable, make: Callable[[], list[int]]) -> list[int]:
        ids = self._pieces.get(key)
        if ids is None:
            ids = make()
            while len(self._pieces) >= REMEMBERED:
                self._pieces.pop(next(iter(self._pieces)), None)  # the oldest
            self._pieces[key] = ids
        return ids

    def _clip(
        self, shape: ClipShape, frames: np.ndarray, where: str, device: str | None = None
    ) -> tuple[Inputs, list[int]]:
        """Inputs and ids of a video; of ``device="meta"``, the ids alone are of use."""
        self.check_videos(where)
        from transformers.video_utils import VideoMetadata

        (width, height), indices, fps, total = shape
        about = VideoMetadata(total, fps, width, height, total / fps, frames_indices=list(indices))
        options: dict[str, Any] = {"video_metadata": [about], "do_sample_frames": False, "return_metadata": True}
        if "cap_pixels_per_frame" in _argument_names(self.wrapped.video_processor):
            options["cap_pixels_per_frame"] = False
        if device is not None and isinstance(self.wrapped.video_processor, FrameProcessor):
            options["device"] = device
        size = f"video {len(indices)}x{width}x{height}"
        return self._call("video", size, where, videos=[frames], videos_kwargs=options)

    def _call(self, kind: str, size: str, where: str, **media: Any) -> tuple[Inputs, list[int]]:
        try:
            made = self.wrapped(
                text=[self.placeholders[kind]],
                return_tensors="pt",
                text_kwargs={"add_special_tokens": False},
                **media,
            )
        except (ValueError, TypeError, RuntimeError, ZeroDivisionError) as failure:
            raise DataError(f"the processor refuses the {kind}: {failure}", key=where, got=size) from failure
        inputs = {name: torch.as_tensor(value) for name, value in made.items() if name not in TEXT_NAMES}
        if "pixel_attention_mask" in inputs:  # of Idefics3, with an axis of rows, of which there is one
            inputs = {name: tensor.flatten(0, 1) for name, tensor in inputs.items()}
        return inputs, made["input_ids"][0].tolist()


def join_inputs(parts: Sequence[Mapping[str, torch.Tensor]]) -> Inputs:
    """The inputs of several images and videos, or of several turns, as those of one row: joined along the first axis.

    Raises:
        NotBuiltError: a family whose images of different sizes have tensors of different shapes.
    """
    filled = [part for part in parts if part]
    if len(filled) <= 1:
        return dict(filled[0]) if filled else {}
    joined: Inputs = {}
    for name in dict.fromkeys(name for part in filled for name in part):
        tensors = [part[name] for part in filled if name in part]
        if len({tensor.shape[1:] for tensor in tensors}) > 1:
            shapes = [tuple(tensor.shape) for tensor in tensors]
            raise NotBuiltError(f"several images of different sizes in one row of this family ({name})", got=shapes)
        joined[name] = torch.cat(tensors)
    return joined


def load_processor(
    name_or_path: str | Path,
    tokenizer: Tokenizer | None = None,
    *,
    key: str = "name_or_path",
    trust_remote_code: bool = False,
    call: Mapping[str, Any] | None = None,
) -> VisionProcessor | None:
    """The image processor of a model; None for a model that reads only text, or is loaded as one.

    Args:
        name_or_path: as for `hf_tokenizer`.
        tokenizer: of the model; its chat template is the processor's. None loads it.
        key: the setting that named the model.
        call: further arguments of each call (``data.mm_processor_kwargs``).

    Raises:
        ModelError: it could not be built, or there is no processor class for this kind of model.
    """
    source = source_of(name_or_path, key)
    folder = Path(source)
    facts = _processor_facts(folder)
    if folder.is_dir():
        as_text = _read_facts(folder, "config.json").get("model_type") in set(TEXT_TOO) - SEEN.keys()
        if as_text or not any(facts.get(name) for name in OF_IMAGES):
            return None
    try:
        hf = _build(source, tokenizer, facts, trust_remote_code)
    except (OSError, ValueError, ImportError, KeyError, TypeError, AttributeError) as failure:
        raise ModelError(
            f"its processor could not be loaded: {brief(failure)}",
            key=key,
            got=str(name_or_path),
            fix="" if _has_torchvision() else "Some processors need torchvision, which is not installed.",
        ) from failure
    if hf is None:
        return None
    return VisionProcessor(hf, folder if folder.is_dir() else None, call)


def processor_of(model: Any, tokenizer: Tokenizer, call: Mapping[str, Any] | None = None) -> VisionProcessor | None:
    """The processor of a ``model`` section; errors name its settings. Arguments as in `load_processor`."""
    with full_keys(model):
        return load_processor(model.path, tokenizer, key="path", trust_remote_code=model.trust_remote_code, call=call)


def _build(source: str, tokenizer: Any, facts: Mapping[str, Any], trust_remote_code: bool) -> Any:
    """The processor of transformers, or None for a model that reads only text."""
    from transformers import AutoConfig, AutoImageProcessor, AutoProcessor, AutoTokenizer, PreTrainedTokenizerBase

    remote = {"trust_remote_code": trust_remote_code}
    if _has_torchvision() or "auto_map" in facts:
        hf = AutoProcessor.from_pretrained(source, **remote)
        if not isinstance(hf, PreTrainedTokenizerBase):
            if tokenizer is not None:
                hf.tokenizer = tokenizer
            kind = _read_facts(Path(source), "config.json").get("model_type")
            if "video" not in SEEN.get(str(kind), ()):
                hf.video_processor = None
            return hf
    config = AutoConfig.from_pretrained(source, **remote)
    cls = _processor_class(config.model_type)
    if cls is None:
        if getattr(config, "vision_config", None) is None:
            return None
        raise ValueError(f"transformers has no processor class for model_type {config.model_type!r}")
    images = AutoImageProcessor.from_pretrained(source, **remote)
    text = AutoTokenizer.from_pretrained(source, **remote) if tokenizer is None else tokenizer
    more = {name: facts[name] for name in ("image_seq_length", "image_seq_len") if name in facts}
    if "video" in SEEN.get(config.model_type, ()):
        more["video_processor"] = FrameProcessor.of(config, source, facts, images)
    elif "video_processor" in inspect.signature(cls).parameters:  # of SmolVLM, whose videos are not built
        more["video_processor"] = None
    return _with_frames(cls)(image_processor=images, tokenizer=text, chat_template=text.chat_template, **more)


def _processor_class(model_type: str) -> Any:
    """The class that transformers lists for this kind of model; nothing is looked up by a name from the files."""
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    name = PROCESSOR_MAPPING_NAMES.get(model_type)
    return None if name is None else getattr(transformers, name)


def _with_frames(cls: type[Any]) -> type[Any]:
    """The class with a video processor that may be missing, or ours."""

    class WithFrames(cls):  # type: ignore[valid-type, misc]
        def check_argument_for_proper_class(self, argument_name: str, argument: object) -> Any:
            """Nothing to check of a part that is not there, or not of transformers."""
            is_ours = argument is None or isinstance(argument, FrameProcessor)
            return None if is_ours else super().check_argument_for_proper_class(argument_name, argument)

    WithFrames.__name__ = cls.__name__
    return WithFrames


def _processor_facts(folder: Path) -> dict[str, Any]:
    """What the processor's files say, the later ones over the earlier ones."""
    facts: dict[str, Any] = {}
    for name in reversed(PROCESSOR_FILES):
        facts |= _read_facts(folder, name)
    return facts


def _read_facts(folder: Path, name: str) -> dict[str, Any]:
    """What a file of JSON says; nothing where there is none."""
    try:
        facts = read_json((folder / name).read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as failure:
        raise ModelError(f"{name} cannot be read: {failure}", got=str(folder)) from failure
    return facts if isinstance(facts, dict) else {}


def _checked_arguments(hf: Any, call: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call without those that are applied before it; names that it does not take are refused."""
    allowed = sorted(_argument_names(hf.image_processor))
    for name in call:
        if name not in allowed and name not in OWN_SIZES:
            fix = suggest(name, allowed)
            key = "data.mm_processor_kwargs"
            raise ConfigError("the image processor takes no such argument", key=key, got=name, allowed=allowed, fix=fix)
    return {name: value for name, value in call.items() if name not in OWN_SIZES}


def _argument_names(image_processor: Any) -> set[str]:
    kinds = getattr(image_processor, "valid_kwargs", None)
    return {name for kind in getattr(kinds, "__mro__", ()) for name in getattr(kind, "__annotations__", {})}


def _has_torchvision() -> bool:
    return importlib.util.find_spec("torchvision") is not None
