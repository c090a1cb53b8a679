"""The images of a batch in an engine: those of a micro-batch, and where their tokens are on the rotary axes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.errors import DataError
from verl.models.vision import Picture, PlacedPicture, VisionFamily, VisionInputs

COLUMN = "multi_modal_inputs"
Piece = tuple[int, int, int]
"""Row, first token and end."""


@dataclass(frozen=True)
class SeenRows:
    """What the rows of a batch show.

    Args:
        placed: per row its pictures, in the order of their tokens.
        positions: (axes, B, L) int64 on the rotary axes.
    """

    family: VisionFamily
    placed: list[list[PlacedPicture]]
    positions: Tensor

    @classmethod
    def of(cls, column: Iterable[Any], tokens: Tensor, lengths: Sequence[int], family: VisionFamily) -> SeenRows:
        """From ``multi_modal_inputs`` of rows that are shifted to the left.

        Args:
            tokens: (B, L) int64. lengths: per row how many of them are its own.

        Raises:
            DataError: pictures and placeholders of a row do not fit; it names the row.
        """
        pictures_of: dict[int, list[Picture]] = {}
        placed, positions = [], torch.empty(family.axes, *tokens.shape, dtype=torch.long)
        for row, inputs in enumerate(column):
            if id(inputs) not in pictures_of:  # the samples of a prompt share what the processor made
                pictures_of[id(inputs)] = _in_row(row, family.pictures, entry_tensors(inputs))
            mine = _in_row(row, family.place, tokens[row, : lengths[row]], pictures_of[id(inputs)])
            positions[:, row] = family.positions(tokens.shape[1], mine)
            placed.append(mine)
        return cls(family, placed, positions)

    @property
    def kinds(self) -> list[str]:
        """Of pictures that there are."""
        return sorted({p.picture.kind for row in self.placed for p in row})

    def digest(self, row: int, length: int) -> bytes:
        """Equal for rows whose first ``length`` tokens show the same."""
        return b"".join(p.picture.digest for p in self.placed[row] if p.end <= length)

    def inputs(self, pieces: Sequence[Piece], starts: Sequence[int], device: str) -> VisionInputs | None:
        """The pictures in pieces of rows.

        A picture that a piece cuts off is left out: nothing behind it is predicted, or the row would be longer.

        Args:
            pieces: of rows. starts: where each begins in the flattened tokens of the pass.
        """
        return VisionInputs.of(self.family, self._there(pieces, starts), device)

    def runs_ahead(self, pieces: Sequence[Piece], starts: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """(first, end) in the pass of tokens that see each other in both directions."""
        if not self.family.sees_ahead:
            return ()
        there = self._there(pieces, starts)
        return tuple((at + first, at + first + count) for p, at in there for first, count in p.runs)

    def _there(self, pieces: Sequence[Piece], starts: Sequence[int]) -> list[tuple[PlacedPicture, int]]:
        """Pictures in the pieces, and what is added to their tokens' numbers."""
        return [
            (placement, at - start)
            for (row, start, end), at in zip(pieces, starts)
            for placement in self.placed[row]
            if start <= placement.start and placement.end <= end
        ]

    def with_axes(self, text: Tensor, pieces: Sequence[tuple[int, int, int]]) -> Tensor:
        """Positions of a packed row, (1, T) -> (1 + axes, 1, T): the text's own ones first, as attention counts."""
        if self.family.axes == 1:
            return text
        rotary = torch.cat([self.positions[:, row, start:end] for row, start, end in pieces], 1)
        return torch.cat((text[None], rotary[:, None].to(text.device)))

    def with_axes_of_rows(self, text: Tensor, index: Tensor) -> Tensor:
        """The same of padded rows, (b, l) -> (1 + axes, b, l)."""
        if self.family.axes == 1:
            return text
        return torch.cat((text[None], self.positions[:, index, : text.shape[1]].to(text.device)))


def has_pictures(columns: Mapping[str, Any]) -> bool:
    """Whether any row of a batch has an image or a video."""
    return COLUMN in columns and any(bool(row) for row in columns[COLUMN])


def entry_tensors(inputs: Mapping[str, Any] | None) -> dict[str, Tensor]:
    """A row's entry as tensors; arrays are what a wire may have made of them."""
    return {
        name: value if isinstance(value, Tensor) else torch.as_tensor(np.asarray(value))
        for name, value in (inputs or {}).items()
        if value is not None
    }


def _in_row(row: int, call: Any, *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except DataError as error:
        raise DataError(f"row {row}: {error.message}", key=error.key, got=error.got, fix=error.fix) from error
