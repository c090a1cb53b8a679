"""The pictures of one forward pass, and the tokens that their features take the place of."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from verl.models.vision.family import KINDS, Kind, PlacedPicture, VisionFamily
from verl.models.vision.towers import language_backbone


@dataclass(frozen=True)
class VisionInputs:
    """Arguments of a model's forward pass in addition to tokens and positions.

    Args:
        tensors: keyword arguments.
        places: kind -> (tokens,) in the flattened tokens of the pass, in the order of the features.
        features: what the tower made of the images, where that is known already; ``tensors`` then has no pixels.
        rows: kind -> those of the features whose tokens are here, where other ranks have the others; None: all are.
    """

    tensors: dict[str, Any]
    places: dict[Kind, Tensor]
    features: Any = None
    rows: dict[Kind, Tensor] | None = None

    @classmethod
    def of(
        cls, family: VisionFamily, placed: Sequence[tuple[PlacedPicture, int]], device: torch.device | str
    ) -> VisionInputs | None:
        """Of pictures and what is added to their tokens' numbers in the flattened pass; None where there are none.

        They come in the order of their tokens: models fill placeholders from the first to the last.
        """
        if not placed:
            return None
        places: dict[Kind, Tensor] = {}
        for kind in KINDS:
            numbers = [n for p, offset in placed if p.picture.kind == kind for n in p.places(offset)]
            if numbers:
                assert numbers == sorted(numbers), "features would go to other tokens than their own"
                places[kind] = torch.tensor(numbers, device=device)
        tensors = family.prepare([p.picture for p, _ in placed])
        return cls({name: tensor.to(device) for name, tensor in tensors.items()}, places)

    def part(self, first: int, length: int) -> VisionInputs:
        """The same for a rank that has ``length`` tokens of the pass from ``first`` on, and sees all pictures.

        Every rank runs the tower on all pictures of the pass, and keeps the features of its tokens: a cut may go
        through a picture, and ranks that gather the tower's weights together must call it equally often.
        """
        here = {kind: ((at >= first) & (at < first + length)).nonzero().flatten() for kind, at in self.places.items()}
        return replace(self, places={kind: at[here[kind]] - first for kind, at in self.places.items()}, rows=here)

    def token_types(self, input_ids: Tensor) -> Tensor:
        """(B, L) int64: 1 where the token of an image is, else 0."""
        return torch.zeros_like(input_ids).view(-1).index_fill(0, self.places["image"], 1).view_as(input_ids)

    def moved(self, width: int, new_width: int) -> VisionInputs:
        """The same for rows that became longer by padding."""
        places = {kind: at // width * new_width + at % width for kind, at in self.places.items()}
        return replace(self, places=places)


@contextlib.contextmanager
def placing(model: nn.Module, vision: VisionInputs | None) -> Iterator[dict[str, Any]]:
    """Within the block the model puts features where ``vision`` says, and no other token counts as a placeholder.

    A model may draw a placeholder itself; its own code would then have more placeholders than features, and stop.

    Yields:
        The arguments in addition to tokens and positions.
    """
    if vision is None:
        yield {}
        return
    backbone = language_backbone(model)
    masks = getattr(backbone, "get_placeholder_mask", None)  # Idefics3 has none
    # Families that take images alone have one mask, the others one per kind.
    per_kind = masks is not None and "video_features" in inspect.signature(masks).parameters

    def mask(
        input_ids: object,
        inputs_embeds: Tensor,
        image_features: Tensor | None = None,
        video_features: Tensor | None = None,
    ) -> Any:
        tokens = inputs_embeds.shape[:-1]
        made = []
        for kind, features in (("image", image_features), ("video", video_features)):
            here = torch.zeros(tokens, dtype=torch.bool, device=inputs_embeds.device)
            at = vision.places.get(kind)  # type: ignore[call-overload]
            if at is not None:
                here.view(-1)[at] = True
                count = None if features is None else features.numel() // inputs_embeds.shape[-1]
                assert count in (None, len(at)), f"{count} features for {len(at)} tokens"
            made.append(here.unsqueeze(-1))
        return tuple(made) if per_kind else made[0]

    def merger(input_ids: object, inputs_embeds: Tensor, image_hidden_states: Tensor) -> Tensor:
        here = mask(input_ids, inputs_embeds, image_hidden_states)
        return inputs_embeds.masked_scatter(here, image_hidden_states.to(inputs_embeds))

    tensors = vision.tensors
    replaced: dict[str, Any] = {"inputs_merger": merger} if masks is None else {"get_placeholder_mask": mask}
    if vision.features is not None and takes_features(backbone):
        tensors = {**tensors, "mm_encoder_outputs": {"image": vision.features}}
    elif vision.features is not None:  # such a model calls its tower wherever there are pixels, and nowhere else
        tensors = {**tensors, "pixel_values": vision.features.pooler_output[0]}
        replaced["get_image_features"] = lambda *_, **__: vision.features
    assert vision.features is None or vision.rows is None, "features that are given are those of all tokens"
    cut = FeatureCut()
    for kind, rows in (vision.rows or {}).items():
        name = f"get_{kind}_features"
        replaced[name] = partial(cut, getattr(backbone, name), rows)
    for name, function in replaced.items():
        setattr(backbone, name, function)
    try:
        yield tensors
    finally:
        for name in replaced:
            delattr(backbone, name)


class FeatureCut:
    """A tower's output of which only some rows (features) are kept; gradients of the others are zero.

    Models may compute the features of videos by their function for images: the outermost call is cut.
    """

    def __init__(self) -> None:
        self._is_inside = False

    def __call__(self, compute: Callable[..., Any], rows: Tensor, *arguments: Any, **more: Any) -> Any:
        if self._is_inside:
            return compute(*arguments, **more)
        self._is_inside = True
        try:
            made = compute(*arguments, **more)
        finally:
            self._is_inside = False
        joined = _joined_rows(made.pooler_output, rows)
        made.pooler_output = joined if isinstance(made.pooler_output, Tensor) else [joined]
        if getattr(made, "deepstack_features", None) is not None:
            made.deepstack_features = [
                x[rows] if isinstance(x, Tensor) else [_joined_rows(x, rows)] for x in made.deepstack_features
            ]
        return made


def _joined_rows(features: Tensor | Sequence[Tensor], rows: Tensor) -> Tensor:
    """Rows of the features of all pictures together, which come as one tensor or as one for each picture."""
    return (features if isinstance(features, Tensor) else torch.cat(tuple(features))).flatten(0, -2)[rows]


def takes_features(backbone: Any) -> bool:
    """Whether a pass may be given what the tower made; transformers 5.17 would ignore the argument without a word."""
    return "mm_encoder_outputs" in inspect.signature(type(backbone).forward).parameters
