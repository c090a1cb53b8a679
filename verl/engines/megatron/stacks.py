"""An adapter's factors for the experts of a layer: one matrix in peft's file, one part per expert on the ranks.

A part has the file's name and the expert's number in brackets. In the file the first factors of E experts lie below
each other, (E r, in), and the columns of the second ones take turns, (out, r E).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

_PART = re.compile(r"(.+)\[(\d+)\]")
_FIRST = ".lora_A.weight"


def part_name(name: str, expert: int | str) -> str:
    """That of an expert's part."""
    return f"{name}[{expert}]"


def of_part(name: str) -> tuple[str, int] | None:
    """Name in the file and number of the expert; None where a name is no part's."""
    match = _PART.fullmatch(name)
    return None if match is None else (match[1], int(match[2]))


def part_of_stack(name: str, stack: Tensor, expert: int, count: int) -> Tensor:
    """The part of one of ``count`` experts, a view."""
    if name.endswith(_FIRST):
        return stack.unflatten(0, (count, -1))[expert]
    return stack.unflatten(1, (-1, count))[..., expert]


def stacked(name: str, parts: Sequence[Tensor]) -> Tensor:
    """All experts' parts as the file has them."""
    return torch.cat(list(parts)) if name.endswith(_FIRST) else torch.stack(list(parts), -1).flatten(1)


def stacked_shapes(shapes: Mapping[str, tuple[int, ...]], count: int) -> dict[str, tuple[int, ...]]:
    """Shapes as the file has them, of weights and of parts of ``count`` experts."""
    on_disk = {}
    for name, shape in shapes.items():
        part = of_part(name)
        if part is None:
            on_disk[name] = tuple(shape)
        elif part[1] == 0:
            (rows, columns), (stack, _) = shape, part
            on_disk[stack] = (rows * count, columns) if stack.endswith(_FIRST) else (rows, columns * count)
    return on_disk


class Collected:
    """Weights on their way to a file: parts wait until those of all experts are there.

    Args:
        count: experts of a layer.
    """

    def __init__(self, count: int):
        self._count = count
        self._waiting: dict[str, dict[int, Tensor]] = {}

    def add(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """What is complete with this one."""
        part = of_part(name)
        if part is None:
            yield name, tensor
            return
        stack, expert = part
        waiting = self._waiting.setdefault(stack, {})
        waiting[expert] = tensor
        if len(waiting) == self._count:
            parts = self._waiting.pop(stack)
            yield stack, stacked(stack, [parts[number] for number in range(self._count)])
