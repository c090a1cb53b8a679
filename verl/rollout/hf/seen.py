"""Images in the `hf` sampler: where they lie in a prompt, and their features, computed once for all that show them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from verl.errors import NotBuiltError, RolloutError
from verl.models.vision import Picture, PlacedPicture, VisionFamily, VisionInputs, family_of, language_backbone
from verl.rollout.base import Request

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FEATURE_BYTES = 1 << 28
"""Features of images that are kept for prompts to come, such as the next turns of a conversation."""
REMEMBERED = 256
"""Rows of the processor whose views are known by identity: the samples of a prompt share them."""


@dataclass(frozen=True, eq=False)
class PromptView:
    """The pictures of a prompt.

    Args:
        positions: (axes, L) int64 of its tokens on the rotary axes.
        shift: what is added to a later token's number for its position on every axis.
        digest: equal for prompts that show the same.
    """

    placed: tuple[PlacedPicture, ...]
    positions: Tensor
    shift: int
    digest: bytes


@dataclass
class _KnownInputs:
    """What is known of inputs, which are kept: a freed id would be given again.

    Args:
        last: the tokens and the length of the prefix of the newest request with them, and its view. Samples of a prompt
            come one after the other.
    """

    inputs: Mapping[str, Tensor]
    pictures: list[Picture]
    last: tuple[tuple[tuple[int, ...], int], PromptView] | None = None


class Views:
    """Makes the views of requests.

    Args:
        family: of the sampler's model.
    """

    def __init__(self, family: VisionFamily):
        self.family = family
        self._known: OrderedDict[int, _KnownInputs] = OrderedDict()

    def of(self, request: Request) -> PromptView | None:
        """None where the request shows nothing.

        Raises:
            DataError: its inputs are not this family's, or do not fit its tokens.
        """
        if not request.multi_modal_inputs:
            return None
        entry = self._inputs(request.multi_modal_inputs)
        shape = request.token_ids, len(request.generated_prefix)
        if entry.last is None or entry.last[0] != shape:
            entry.last = shape, self._view(request, entry.pictures)
        return entry.last[1]

    def _view(self, request: Request, pictures: Sequence[Picture]) -> PromptView:
        # What the model drew itself is text, whichever tokens it is.
        placed = self.family.place(torch.tensor(request.token_ids), pictures)
        length = len(request.token_ids) + len(request.generated_prefix)
        positions = self.family.positions(length + 1, placed)
        shift = int(positions[0, -1]) - length
        return PromptView(tuple(placed), positions[:, :-1], shift, b"".join(one.picture.digest for one in placed))

    def _inputs(self, inputs: Mapping[str, Tensor]) -> _KnownInputs:
        entry = self._known.get(id(inputs))
        if entry is None:
            self._known[id(inputs)] = entry = _KnownInputs(inputs, self.family.pictures(inputs))
            if len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        return entry


def check_sight(request: Request, model: PreTrainedModel, views: Views | None) -> None:
    """Refuse the pictures of a request that the sampler cannot show its model; one without ``views`` shows none."""
    key, kind = f"request {request.id}", type(model).__name__
    if family_of(model.config) is None:
        raise RolloutError(f"{kind} takes no images, and the request has some", key=key)
    if views is None:
        raise NotBuiltError(f"{kind} is sampled through transformers' own cache, where images are not built", key=key)
    if not request.multi_modal_inputs:
        raise RolloutError(
            "the hf sampler calls the model itself and has no processor",
            key=key,
            got="images without multi_modal_inputs",
            fix="Give the request what the processor made of its images: data.return_multi_modal_inputs=true.",
        )


class Features:
    """What the tower makes of pictures, kept until the weights change.

    Args:
        model: of the sampler.
        one_by_one: each picture in a call of its own, so that no result depends on the others.

    Attributes:
        num_encoded: pictures that went through the tower.
        never_drawn: (N,) int64, the tokens of the family that no row draws; None where it has none.
    """

    def __init__(self, model: PreTrainedModel, family: VisionFamily, one_by_one: bool = False):
        self.model, self.family, self.one_by_one = model, family, one_by_one
        self.num_encoded = 0
        never = family.never_drawn
        self.never_drawn = torch.tensor(never, device=model.device) if never else None
        self._kept: OrderedDict[bytes, tuple[Tensor, ...]] = OrderedDict()
        self._output: Any = None
        self._is_joined = self._deep_is_joined = False

    def clear(self) -> None:
        """Drop everything: the tower has other weights."""
        self._kept = OrderedDict()

    def inputs(self, pieces: Sequence[tuple[PromptView, int, int, int]]) -> VisionInputs | None:
        """What a pass over pieces of prompts is called with.

        Args:
            pieces: view, first token, end, and where the piece begins in the pass.
        """
        runs = [run for view, start, end, at in pieces for run in _runs(view, start, end, at)]
        if not runs:
            return None
        self._encode({one.digest: one for one, _, _, _ in runs})
        parts = [self._kept[one.digest] for one, _, _, _ in runs]
        joined = [
            torch.cat([part[layer][first : first + count] for part, (_, first, count, _) in zip(parts, runs)])
            for layer in range(len(parts[0]))
        ]
        places = torch.cat([torch.arange(at, at + count) for _, _, count, at in runs]).to(joined[0].device)
        deep = {"deepstack_features": [self._as_made(layer) for layer in joined[1:]]} if joined[1:] else {}
        features = self._output(pooler_output=joined[0] if self._is_joined else (joined[0],), **deep)
        self._forget_old(keep={one.digest for one, _, _, _ in runs})
        return VisionInputs({}, {"image": places}, features)

    def _encode(self, pictures: Mapping[bytes, Picture]) -> None:
        missing = [picture for digest, picture in pictures.items() if digest not in self._kept]
        for digest in pictures.keys() & self._kept.keys():
            self._kept.move_to_end(digest)
        for kind in self.family.kinds:
            of_kind = [picture for picture in missing if picture.kind == kind]
            size = 1 if self.one_by_one else max(1, len(of_kind))
            for first in range(0, len(of_kind), size):
                self._through_tower(of_kind[first : first + size])

    def _through_tower(self, pictures: Sequence[Picture]) -> None:
        device = self.model.device
        tensors = {name: tensor.to(device) for name, tensor in self.family.prepare(pictures).items()}
        backbone = language_backbone(self.model)
        encode = backbone.get_image_features if pictures[0].kind == "image" else backbone.get_video_features
        features = encode(*tensors.values(), return_dict=True)
        self._output = type(features)
        deep = getattr(features, "deepstack_features", None) or ()
        self._is_joined = torch.is_tensor(features.pooler_output)
        self._deep_is_joined = any(torch.is_tensor(layer) for layer in deep)
        counts = [sum(one.runs) for one in pictures]
        layers = [
            (layer if torch.is_tensor(layer) else torch.cat(tuple(layer))).flatten(0, -2).split(counts)
            for layer in (features.pooler_output, *deep)
        ]
        for number, picture in enumerate(pictures):
            self._kept[picture.digest] = tuple(layer[number] for layer in layers)
        self.num_encoded += len(pictures)

    def _as_made(self, layer: Tensor) -> Tensor | tuple[Tensor]:
        """One layer's features in the form that the tower gives them: one tensor for all images (5.17), or a tuple."""
        return layer if self._deep_is_joined else (layer,)

    def _forget_old(self, keep: set[bytes]) -> None:
        used = sum(layer.nbytes for layers in self._kept.values() for layer in layers)
        for digest in list(self._kept):
            if used <= FEATURE_BYTES:
                return
            if digest not in keep:
                used -= sum(layer.nbytes for layer in self._kept.pop(digest))


def _runs(view: PromptView, start: int, end: int, at: int) -> list[tuple[Picture, int, int, int]]:
    """Picture, its first feature, how many, and their place in the pass, within tokens start to end of a prompt.

    A piece may begin or end within a picture.
    """
    runs = []
    for placed in view.placed:
        feature = 0
        for first, count in placed.runs:
            begin, stop = max(first, start), min(first + count, end)
            if begin < stop:
                runs.append((placed.picture, feature + begin - first, stop - begin, at + begin - start))
            feature += count
    return sorted(runs, key=lambda run: run[3])
