"""The interface of a family of models that see, and what all families share."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from verl.errors import DataError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Kind = Literal["image", "video"]
KINDS: tuple[Kind, ...] = ("image", "video")


@dataclass(frozen=True, eq=False)
class Picture:
    """One image or video, as the processor made it.

    Args:
        kind: which tokens stand for it.
        tensors: what the tower is called with, for this one alone.
        runs: how many tokens it takes; several numbers where text stands between the frames of a video.
        grid: frames, height and width of one run, in tokens; their product is its number of tokens.
        interval: positions between two frames of a run.
    """

    kind: Kind
    tensors: Mapping[str, Tensor]
    runs: tuple[int, ...]
    grid: tuple[int, int, int]
    interval: float = 1.0

    @cached_property
    def digest(self) -> bytes:
        """Equal for pictures with equal pixels and positions, whichever objects hold them."""
        made = hashlib.blake2b(digest_size=16)
        for name, tensor in sorted(self.tensors.items()):
            made.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}{self.interval}".encode())
            made.update(tensor.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes())
        return made.digest()


@dataclass(frozen=True, eq=False)
class PlacedPicture:
    """A picture in a sequence of tokens.

    Args:
        runs: (first token, number of tokens) of each of its runs.
    """

    picture: Picture
    runs: tuple[tuple[int, int], ...]

    @property
    def start(self) -> int:
        return self.runs[0][0]

    @property
    def end(self) -> int:
        """The token behind its last one."""
        return self.runs[-1][0] + self.runs[-1][1]

    def places(self, offset: int) -> Iterator[int]:
        """Its tokens, in the order of the tower's features, moved by ``offset``."""
        for start, count in self.runs:
            yield from range(start + offset, start + offset + count)


class VisionFamily(ABC):
    """One family.

    Args:
        config: of the model.

    Attributes:
        name: ``model_type`` of its models.
        axes: of its rotary embedding; 1 where a position is one number.
        tower: names below the language model and its tower of what turns pixels into features, the projector included.
        sees_ahead: whether the tokens of a run see each other in both directions.
    """

    axes: ClassVar[int] = 1
    tower: ClassVar[tuple[str, ...]] = ("visual",)
    sees_ahead: ClassVar[bool] = False
    kinds: ClassVar[tuple[Kind, ...]] = KINDS
    keys: ClassVar[frozenset[str]]
    """What its processor makes that the tower or the positions need."""
    unread: ClassVar[frozenset[str]] = frozenset(("mm_token_type_ids", "input_ids", "attention_mask"))
    """What processors give besides, and is known from the tokens."""

    def __init__(self, config: PretrainedConfig):
        self.config, self.name = config, str(config.model_type)

    @abstractmethod
    def token_id(self, kind: Kind) -> int:
        """The placeholder."""

    @property
    def never_drawn(self) -> tuple[int, ...]:
        """Tokens that samplers keep the policy from drawing: later turns would take them for those of a picture.

        A placeholder may be beyond the vocabulary, as in some checkpoints of Gemma 3. No logit stands for it.
        """
        vocab_size = self.config.get_text_config().vocab_size
        return tuple(sorted(token for token in self._marks() if token < vocab_size))

    def _marks(self) -> set[int]:
        """The placeholders, and what else begins a picture."""
        return {self.token_id(kind) for kind in self.kinds}

    def _is_placeholder(self, ids: np.ndarray, kind: Kind) -> np.ndarray:
        """(L,) bool: which tokens of a row stand for a picture of this kind."""
        return ids == self.token_id(kind)

    @abstractmethod
    def _pictures(self, inputs: Mapping[str, Tensor]) -> list[Picture]:
        """As `pictures`, of inputs whose names are known."""

    @abstractmethod
    def smallest(self, kind: Kind) -> Picture:
        """A picture of as few tokens as the tower allows, all zeros."""

    @abstractmethod
    def patches(self, picture: Picture) -> tuple[int, int]:
        """Patches that a picture has in the tower, and in how many frames they attend to each other."""

    def pictures(self, inputs: Mapping[str, Tensor]) -> list[Picture]:
        """The images, then the videos of one row, each in its order.

        Args:
            inputs: what the processor made for this row alone.

        Raises:
            DataError: something that this family's tower does not take, or that does not fit together.
        """
        strange = sorted(set(inputs) - self.keys - self.unread)
        if strange:
            raise DataError(
                f"models of the family {self.name} take no such input",
                key=f"multi_modal_inputs.{strange[0]}",
                allowed=sorted(self.keys),
                fix="Do model and processor belong together?",
            )
        made = self._pictures(inputs)
        for picture in made:
            for name, like in self.smallest(picture.kind).tensors.items():
                tensor = picture.tensors[name]
                if tensor.shape[1:] != like.shape[1:] or tensor.is_floating_point() != like.is_floating_point():
                    got, allowed = (f"{x.dtype} of shape (..., {[*x.shape[1:]]})" for x in (tensor, like))
                    key = f"multi_modal_inputs.{name}"
                    raise DataError("not what the tower takes of a picture", key=key, got=got, allowed=allowed)
        return made

    def place(self, tokens: Tensor, pictures: Sequence[Picture]) -> list[PlacedPicture]:
        """Find the tokens of each picture: the next run of placeholders that is long enough.

        A placeholder that the model itself drew is text, so runs that are too short are passed over, and what is left
        behind the last picture stays text.

        Args:
            tokens: (L,) int64 of one row, without padding.

        Returns:
            In the order of the tokens.

        Raises:
            DataError: a picture has no tokens.
        """
        placed: list[PlacedPicture] = []
        ids = tokens.numpy()
        for kind in KINDS:
            of_kind = [picture for picture in pictures if picture.kind == kind]
            if not of_kind:
                continue
            spans = _spans(self._is_placeholder(ids, kind))
            for picture in of_kind:
                runs = []
                for count in picture.runs:
                    while spans and spans[0][1] < count:
                        spans.pop(0)
                    if not spans:
                        raise self._too_few(ids, kind, of_kind)
                    start, length = spans[0]
                    spans[0] = (start + count, length - count)
                    runs.append((start, count))
                placed.append(PlacedPicture(picture, tuple(runs)))
        return sorted(placed, key=lambda p: p.start)

    def _too_few(self, ids: np.ndarray, kind: Kind, pictures: Sequence[Picture]) -> DataError:
        expected, present = sum(sum(p.runs) for p in pictures), int(self._is_placeholder(ids, kind).sum())
        return DataError(
            f"{len(pictures)} {kind}s take {expected} tokens, and the row lacks placeholders where they belong",
            key="input_ids",
            got=present,
            fix="Was the prompt cut, or expanded by another processor than the one that made the inputs?",
        )

    def positions(self, length: int, placed: Sequence[PlacedPicture]) -> Tensor:
        """(axes, length) int64: the position of each token on the axes of the rotary embedding.

        Text advances by one on all axes. A picture starts there and spreads over frames, rows and columns; the
        text behind it continues after the longer edge (Qwen2-VL, arXiv 2409.12191, section 2.1).
        """
        made = torch.empty(self.axes, length, dtype=torch.long)
        at = current = 0
        if self.axes > 1:
            for (start, count), picture in sorted((run, p.picture) for p in placed for run in p.runs):
                made[:, at:start] = torch.arange(current, current + start - at)
                current += start - at
                made[:, start : start + count] = current + _spread(picture)
                current, at = current + max(picture.grid[1:]), start + count
        made[:, at:] = torch.arange(current, current + length - at)
        return made

    def prepare(self, pictures: Sequence[Picture]) -> dict[str, Tensor]:
        """The forward pass's arguments for these pictures, in addition to tokens and positions."""
        joined: dict[str, list[Tensor]] = {}
        for picture in pictures:
            for name, tensor in picture.tensors.items():
                joined.setdefault(name, []).append(tensor)
        return {name: torch.cat(tensors) for name, tensors in joined.items()}


def _spans(here: np.ndarray) -> list[tuple[int, int]]:
    """(first, length) of every run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], here.astype(np.int8), [0]))))
    return [(int(first), int(end - first)) for first, end in zip(edges[::2], edges[1::2])]


def _spread(picture: Picture) -> Tensor:
    """(3, tokens of a run): frame, row and column of each token, from 0."""
    frames, rows, columns = picture.grid
    frame = (torch.arange(frames) * picture.interval).long().repeat_interleave(rows * columns)
    row = torch.arange(rows).repeat_interleave(columns).repeat(frames)
    return torch.stack((frame, row, torch.arange(columns).repeat(frames * rows)))
