"""A model in stages, one per rank: the 1F1B schedule, and what neighbours send each other.

torch's own schedules want equally long micro-batches, because a stage learns the shapes of its input once. Here every
stage has the same rows, so it knows the shape of each micro-batch, and none is padded for another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl.distributed import Ranks

FORWARD, BACKWARD = "forward", "backward"
Forward = Callable[[int, Tensor | None], Tensor]
"""Number of a micro-batch, hidden states of the stage before -> own hidden states, or the loss on the last stage."""


def one_forward_one_backward(stage: int, stages: int, count: int) -> Iterator[tuple[str, int]]:
    """What a stage does with ``count`` micro-batches, in order.

    A stage has at most as many micro-batches open as stages are left from it on (Narayanan et al. 2021, arXiv
    2104.04473, section 2.2).
    """
    ahead = min(stages - stage - 1, count)
    yield from ((FORWARD, number) for number in range(ahead))
    for number in range(ahead, count):
        yield FORWARD, number
        yield BACKWARD, number - ahead
    yield from ((BACKWARD, number) for number in range(count - ahead, count))


class Pipeline:
    """The stages of a model. A pipeline of one stage sends nothing.

    Args:
        stages: its ranks, in the order of the stages.
        back: the same ranks in another group, for gradients. NCCL keeps the order of a group's messages, so in one
            group two neighbours that send to each other would wait for each other.
        width, dtype, device: of hidden states.
    """

    def __init__(self, stages: Ranks, back: Ranks, width: int, dtype: torch.dtype, device: str):
        self.stages, self._back = stages, back
        self._width, self._dtype, self._device = width, dtype, device
        self._on_the_way: list[tuple[Any, Tensor]] = []

    @property
    def is_first(self) -> bool:
        """Whether this stage has the embedding."""
        return self.stages.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage has the head."""
        return self.stages.rank == self.stages.size - 1

    def forward(self, shapes: Sequence[tuple[int, int]], forward: Forward) -> None:
        """All micro-batches, without gradient. Collective.

        Args:
            shapes: (rows, tokens) of the hidden states of each micro-batch on this rank.
        """
        for number, shape in enumerate(shapes):
            out = forward(number, self._received(shape))
            if not self.is_last:
                self._send(self.stages, out, self.stages.rank + 1)
        self._wait()

    def train(self, shapes: Sequence[tuple[int, int]], forward: Forward) -> None:
        """All micro-batches forward and backward. Collective; arguments of `forward`."""
        opened: deque[tuple[Tensor | None, Tensor]] = deque()
        for what, number in one_forward_one_backward(self.stages.rank, self.stages.size, len(shapes)):
            if what == FORWARD:
                inputs = self._received(shapes[number])
                if inputs is not None:
                    inputs.requires_grad_()
                out = forward(number, inputs)
                if not self.is_last:
                    self._send(self.stages, out.detach(), self.stages.rank + 1)
                opened.append((inputs, out))
                continue
            inputs, out = opened.popleft()
            gradient = None
            if not self.is_last:
                gradient = torch.empty_like(out)
                self._receive(self._back, gradient, self.stages.rank + 1)
            torch.autograd.backward(out, gradient)
            if inputs is not None:
                assert inputs.grad is not None, "every stage computes with what it is given"
                self._send(self._back, inputs.grad, self.stages.rank - 1)
        self._wait()

    def _received(self, shape: tuple[int, int]) -> Tensor | None:
        if self.is_first:
            return None
        hidden = torch.empty(*shape, self._width, dtype=self._dtype, device=self._device)
        self._receive(self.stages, hidden, self.stages.rank - 1)
        return hidden

    def _send(self, ranks: Ranks, values: Tensor, to: int) -> None:
        values = values.contiguous()
        # The neighbour receives in the order in which this stage sends, because both go by the same schedule.
        self._on_the_way.append((dist.isend(values, group=ranks.group, group_dst=to), values))

    def _receive(self, ranks: Ranks, values: Tensor, sender: int) -> None:
        # Waits for a neighbour, which sends without waiting for this stage: no deadlock.
        dist.recv(values, group=ranks.group, group_src=sender)

    def _wait(self) -> None:
        """Until everything that was sent has arrived."""
        for work, _ in self._on_the_way:
            work.wait()
        self._on_the_way.clear()
