"""Images and videos of requests as vLLM's engine takes them: the trainer's tensors, and where their tokens are.

vLLM's image processor is passed over: prompts are the trainer's tokens, and features those of its pixels.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from verl.errors import NotBuiltError, RolloutError
from verl.models.vision import Picture, PlacedPicture, VisionFamily, family_of
from verl.models.vision.qwen3 import Qwen3Vision
from verl.rollout.base import Request
from verl.rollout.server.pictures import ByIdentity

SECONDS, PIXELS, MASK = "second_per_grid_ts", "pixel_values", "pixel_attention_mask"


class SeenPrompts:
    """Makes vLLM's form of prompts with images or videos.

    Args:
        family: of the model.
        processor: vLLM's of the model: it knows which tensors belong to which image.
        on_cpu: whether vLLM computes on the CPU.
    """

    def __init__(self, family: VisionFamily, processor: Any, on_cpu: bool):
        self.family, self.processor, self.on_cpu = family, processor, on_cpu
        self._known: ByIdentity[list[tuple[Picture, Any]]] = ByIdentity(self._items)

    @classmethod
    def of(cls, engine: Any, on_cpu: bool) -> SeenPrompts | None:
        """For an engine of vLLM; None where its model reads text alone."""
        family = family_of(engine.model_config.hf_config)
        processor = getattr(getattr(engine, "renderer", None), "mm_processor", None)
        return None if family is None else cls(family, processor, on_cpu)

    def check_text(self, request: Request) -> None:
        """Refuse placeholders of pictures that a request does not show: vLLM would read them as text.

        Raises:
            RolloutError: its prompt has some.
        """
        kind = next((kind for kind in self.family.kinds if self.family.token_id(kind) in request.token_ids), None)
        if kind is not None:
            fix = "Give the request its images or videos and what the processor made of them (multi_modal_inputs)."
            message = f"the prompt has placeholders of {kind}s, and the request shows none"
            raise RolloutError(message, key=f"request {request.id}", fix=fix)

    def prompt(self, request: Request) -> dict[str, Any]:
        """vLLM's ``MultiModalInput`` of a request.

        Raises:
            RolloutError: it has no tensors, or this version takes none. DataError: they do not fit its tokens.
            NotBuiltError: vLLM would compute something else than the model.
        """
        if self.family.sees_ahead and self.on_cpu:  # its kernel there knows causal attention alone
            message = f"on a CPU vLLM lets the tokens of an image of {self.family.name} see only those in front"
            fix = "Set actor_rollout_ref.rollout.name=hf."
            raise NotBuiltError(message, key=f"request {request.id}", fix=fix)
        if self.processor is None:
            fix = "Update vLLM to 0.32, or set actor_rollout_ref.rollout.name=hf."
            raise RolloutError("this version of vLLM takes no tensors of images", key=f"request {request.id}", fix=fix)
        inputs = request.multi_modal_inputs
        if not inputs:
            fix = "Give the request what the processor made of its images: data.return_multi_modal_inputs=true."
            raise RolloutError("images without multi_modal_inputs", key=f"request {request.id}", fix=fix)
        pictures = self._known.of(inputs)
        items = {id(picture): item for picture, item in pictures}
        placed = self.family.place(torch.tensor(request.token_ids), [picture for picture, _ in pictures])
        for one in placed:
            self._check_time(one.picture, request)
        kinds = {one.picture.kind: [p for p in placed if p.picture.kind == one.picture.kind] for one in placed}
        items_class = importlib.import_module("vllm.multimodal.inputs").MultiModalKwargsItems
        return {
            "type": "multimodal",
            "prompt_token_ids": [*request.token_ids, *request.generated_prefix],
            "mm_kwargs": items_class({kind: [items[id(p.picture)] for p in those] for kind, those in kinds.items()}),
            "mm_hashes": {kind: [p.picture.digest.hex() for p in those] for kind, those in kinds.items()},
            "mm_placeholders": {kind: [self._range(p) for p in those] for kind, those in kinds.items()},
        }

    def _check_time(self, picture: Picture, request: Request) -> None:
        """Text behind a video of Qwen2-VL and Qwen2.5-VL has other positions in vLLM where it lasts long.

        transformers counts on from the longer edge of its frames, vLLM from the largest position on any axis.
        """
        frames, *edges = picture.grid
        last = int((frames - 1) * picture.interval)
        if last < max(edges):
            return
        raise NotBuiltError(
            f"vLLM counts positions behind a video of {self.family.name} from its last frame ({last}), "
            f"transformers from the longer edge of its frames ({max(edges)} tokens)",
            key=f"request {request.id}",
            fix="Show fewer or larger frames (data.mm_processor_kwargs), or set actor_rollout_ref.rollout.name=hf.",
        )

    def _items(self, inputs: Mapping[str, Tensor]) -> list[tuple[Picture, Any]]:
        """The pictures of a row, each with vLLM's item of it."""
        items_class = importlib.import_module("vllm.multimodal.inputs").MultiModalKwargsItems
        made, videos = list[tuple[Picture, Any]](), 0
        for picture in self.family.pictures(inputs):
            kind, tensors = picture.kind, dict(picture.tensors)
            if kind == "video" and SECONDS in inputs:
                tensors[SECONDS] = torch.as_tensor(inputs[SECONDS])[videos : videos + 1]
            videos += kind == "video"
            # Of families whose images come in tiles, each tile is an image here.
            one, token = torch.ones(1, dtype=torch.long), torch.tensor(self.family.token_id(kind))
            tensors |= {"num_patches": one, f"{kind}_num_patches": one, f"{kind}_token_id": token}
            if MASK in self.family.keys:  # nothing in a tile is padding
                tensors[MASK] = torch.ones(1, *picture.tensors[PIXELS].shape[2:], dtype=torch.long)
            fields = self.processor._get_mm_fields_config(tensors, {})
            made.append((picture, items_class.from_hf_inputs(tensors, fields)[kind][0]))
        return made

    def _range(self, placed: PlacedPicture) -> Any:
        """vLLM's ``PlaceholderRange``; where it looks for the frames of a video, the mark in front is part of it."""
        is_framed = placed.picture.kind == "video" and isinstance(self.family, Qwen3Vision)
        start = placed.start - (is_framed and placed.start > 0)
        mask = torch.zeros(placed.end - start, dtype=torch.bool)
        for first, count in placed.runs:
            mask[first - start : first - start + count] = True
        kind = importlib.import_module("vllm.multimodal.inputs").PlaceholderRange
        return kind(offset=start, length=len(mask), is_embed=None if bool(mask.all()) else mask)
