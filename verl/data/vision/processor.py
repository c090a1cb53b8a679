"""A model's processor: pixels to tensors, and one placeholder of the prompt to the image's number of tokens.

transformers builds processors of vision models with their video processor, which needs torchvision; without it
`AutoProcessor` returns only the tokenizer, without an error. The image processor is therefore built here.

Prompts are tokenised with one placeholder per image, by the code that keeps special tokens of the data text, and
expanded as ids: what `AutoProcessor` would do in text, with the same tokens.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from verl.config.machine.models import SEEN, TEXT_TOO
from verl.config.schema.node import full_keys
from verl.data.tokenizer import PROCESSOR_FILES, brief, source_of
from verl.data.vision.parts import VIDEOS
from verl.errors import ConfigError, DataError, ModelError, NotBuiltError, suggest
from verl.json_text import read_json

Inputs = dict[str, torch.Tensor]
"""What a processor makes of the images of one row, by the names of the model's arguments."""
TEXT_NAMES = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
"""What a processor makes of the text."""
OF_IMAGES = ("image_processor_type", "image_processor", "processor_class", "image_mean", "patch_size", "auto_map")
"""What a processor's files have if it takes images; those for sounds alone have none of it."""
OWN_SIZES = ("min_pixels", "max_pixels")
"""Arguments that are applied before the processor, so that samplers get the same pictures (`ImageLimits`)."""


class VisionProcessor:
    """A processor of transformers, and what rows of images need of it.

    Everything else (``processor(text=..., images=...)``, ``image_processor``, ``apply_chat_template``) is that of the
    processor of transformers, ``wrapped``.

    Attributes:
        placeholder_id: the id that a chat template writes once for each image.
        image_token_ids: ids that stand for parts of images in expanded prompts; nothing samples them.

    Args:
        wrapped: a processor of transformers with an image processor and a tokenizer.
        folder: where its files are; None for one that has none.
        call: further arguments of each call (``data.mm_processor_kwargs``).
    """

    def __init__(self, wrapped: Any, folder: Path | None = None, call: Mapping[str, Any] | None = None):
        self.wrapped, self.folder = wrapped, folder
        self.call = _checked_arguments(wrapped, call or {})
        self.placeholder = str(wrapped.image_token)
        self.placeholder_id = int(wrapped.tokenizer.convert_tokens_to_ids(self.placeholder))
        if self.placeholder_id == wrapped.tokenizer.unk_token_id or self.placeholder_id < 0:
            raise ModelError(
                f"the tokenizer has no token {self.placeholder!r}, which stands for an image", got=str(folder)
            )
        token = getattr(wrapped.tokenizer, "image_token_id", None)
        self.image_token_ids = frozenset({self.placeholder_id} | ({int(token)} if token is not None else set()))
        self._pieces: dict[tuple[int, int], list[int]] = {}

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

    def process(self, images: Sequence[Image.Image], where: str = "images") -> tuple[Inputs, list[list[int]]]:
        """The tensors of a row's images, and for each image the ids that stand for it in the prompt.

        Args:
            images: RGB; none gives no tensors.
            where: names the row in messages.

        Returns:
            ``pixel_values`` (patches, dim) and ``image_grid_thw`` (images, 3) in the Qwen family; others have others.

        Raises:
            DataError: the processor refuses an image.
        """
        made = [self._one(image, f"{where}, image {number}") for number, image in enumerate(images)]
        return join_inputs([inputs for inputs, _ in made]), [ids for _, ids in made]

    def piece(self, size: tuple[int, int], where: str = "images") -> list[int]:
        """The ids that stand for an image of this (width, height): they depend on nothing else."""
        if size not in self._pieces:
            self._pieces[size] = self._one(Image.new("RGB", size), where)[1]
        return self._pieces[size]

    def expand(self, ids: Sequence[int], pieces: Sequence[Sequence[int]]) -> list[int]:
        """The ids with each placeholder replaced by its piece, in order.

        Raises:
            DataError: there are not as many placeholders as pieces.
        """
        return self.expand_with(ids, pieces, [0] * len(ids))[0]

    def expand_with(
        self, ids: Sequence[int], pieces: Sequence[Sequence[int]], mask: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        """The same, with a mask of the ids that is 0 on images."""
        count = sum(number == self.placeholder_id for number in ids)
        if count != len(pieces):
            raise DataError(
                f"the chat template writes {count} placeholders ({self.placeholder}) for {len(pieces)} images",
                fix="Set custom_chat_template in the model's section to a template that takes image parts.",
            )
        waiting, expanded, masked, seams = iter(pieces), list[int](), list[int](), set[int]()
        for number, keep in zip(ids, mask):
            piece = next(waiting) if number == self.placeholder_id else None
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
        try:
            made = self.wrapped(
                text=[self.placeholder],
                images=[image],
                return_tensors="pt",
                text_kwargs={"add_special_tokens": False},
                images_kwargs=dict(self.call),
            )
        except (ValueError, TypeError, RuntimeError, ZeroDivisionError) as failure:
            size = f"{image.width} x {image.height}"
            raise DataError(f"the processor refuses the image: {failure}", key=where, got=size) from failure
        inputs = {name: value for name, value in made.items() if name not in TEXT_NAMES}
        return inputs, made["input_ids"][0].tolist()


def join_inputs(parts: Sequence[Mapping[str, torch.Tensor]]) -> Inputs:
    """The inputs of several images, or of several turns, as those of one row: joined along the first axis.

    Raises:
        NotBuiltError: a family whose images of different sizes have tensors of different shapes.
    """
    filled = [part for part in parts if part]
    if len(filled) <= 1:
        return dict(filled[0]) if filled else {}
    joined: Inputs = {}
    for name in filled[0]:
        tensors = [part[name] for part in filled]
        if len({tensor.shape[1:] for tensor in tensors}) > 1:
            shapes = [tuple(tensor.shape) for tensor in tensors]
            raise NotBuiltError(f"several images of different sizes in one row of this family ({name})", got=shapes)
        joined[name] = torch.cat(tensors)
    return joined


def load_processor(
    name_or_path: str | Path,
    tokenizer: Any = None,
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


def processor_of(model: Any, tokenizer: Any, call: Mapping[str, Any] | None = None) -> VisionProcessor | None:
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
            return hf
    config = AutoConfig.from_pretrained(source, **remote)
    cls = _processor_class(config.model_type)
    if cls is None:
        if getattr(config, "vision_config", None) is None:
            return None
        raise ValueError(f"transformers has no processor class for model_type {config.model_type!r}")
    images = AutoImageProcessor.from_pretrained(source, **remote)
    text = AutoTokenizer.from_pretrained(source, **remote) if tokenizer is None else tokenizer
    lengths = {name: facts[name] for name in ("image_seq_length", "image_seq_len") if name in facts}
    return _without_videos(cls)(image_processor=images, tokenizer=text, chat_template=text.chat_template, **lengths)


def _processor_class(model_type: str) -> Any:
    """The class that transformers lists for this kind of model; nothing is looked up by a name from the files."""
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    name = PROCESSOR_MAPPING_NAMES.get(model_type)
    return None if name is None else getattr(transformers, name)


def _without_videos(cls: type[Any]) -> type[Any]:
    """The class with a video processor that may be missing."""

    class ImagesOnly(cls):  # type: ignore[valid-type, misc]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            """Nothing to check of a part that is not there."""
            return None if argument is None else super().check_argument_for_proper_class(argument_name, argument)

    ImagesOnly.__name__ = cls.__name__
    return ImagesOnly


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
        if name in ("videos_kwargs", "fps"):
            raise NotBuiltError(VIDEOS, key="data.mm_processor_kwargs", got=name)
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
