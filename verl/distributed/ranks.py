"""A group of ranks and the library's collectives over it.

Numbers and facts travel as small host tensors, facts as JSON text: no pickle crosses a process. On one rank every call
returns at once, so that code is written once for one process and for many.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from verl.errors import EngineError, VerlError, WorkerError
from verl.json_text import Json

T = TypeVar("T")


class Ranks:
    """``size`` processes, of which this is number ``rank``; all of them make the same calls in the same order.

    ``order`` says which number in ``group`` each of them has, where it is not its own.

    Example:
        >>> ranks = verl.distributed.join_group()
        >>> tokens = ranks.sum(torch.tensor([here]))  # over all ranks
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        group: dist.ProcessGroup | None = None,
        order: Sequence[int] | None = None,
    ):
        self.rank, self.size, self.group = rank, size, group
        self.order = range(size) if order is None else order

    @classmethod
    def of_world(cls) -> Ranks:
        """All processes of the group that `start` joined."""
        return cls(dist.get_rank(), dist.get_world_size())

    def __repr__(self) -> str:
        return f"rank {self.rank} of {self.size}"

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """The sum over ranks, the same bits on each; ``values`` stays as it is."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def max(self, values: Tensor) -> Tensor:
        """The maximum over ranks."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def gather(self, values: Tensor) -> list[Tensor]:
        """The tensor of every rank, in rank order; all have one shape and dtype. Collective."""
        if self.size == 1:
            return [values]
        gathered = [torch.empty_like(values, memory_format=torch.contiguous_format) for _ in range(self.size)]
        with self._told():
            dist.all_gather(gathered, values.contiguous(), group=self.group)
        return [gathered[number] for number in self.order]

    def broadcast(self, values: Tensor) -> Tensor:
        """Overwrite ``values`` with those of rank 0. Collective."""
        if self.size > 1:
            with self._told():
                dist.broadcast(values, group=self.group, group_src=self.order[0])
        return values

    def send(self, values: Tensor, to: int) -> dist.Work | None:
        """Begin to send a contiguous host tensor to a rank; the result's ``wait`` returns when it has arrived."""
        with self._told():
            return dist.isend(values.view(-1).view(torch.uint8), group=self.group, group_dst=self.order[to])

    def receive(self, values: Tensor, sender: int) -> None:
        """Fill a contiguous host tensor with what a rank sends."""
        with self._told():
            dist.recv(values.view(-1).view(torch.uint8), group=self.group, group_src=self.order[sender])

    def exchange(self, fact: Json) -> list[Any]:
        """Every rank's JSON value, in rank order."""
        if self.size == 1:
            return [fact]
        data = _to_bytes(fact)
        sizes = [int(size) for size in self.gather(torch.tensor([len(data)]))]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(data)] = data
        return [_from_bytes(payload[:size]) for payload, size in zip(self.gather(padded), sizes)]

    def from_first(self, fact: Json) -> Any:
        """Rank 0's JSON value; what the others pass does not matter."""
        if self.size == 1:
            return fact
        data = _to_bytes(fact) if self.is_first else torch.empty(0, dtype=torch.uint8)
        size = self.broadcast(torch.tensor([len(data)]))
        return _from_bytes(self.broadcast(data if self.is_first else torch.empty(int(size), dtype=torch.uint8)))

    def together(self, work: Callable[[], tuple[T, Any]]) -> tuple[T, list[Any]]:
        """Do something that may fail on some ranks only, before a collective that all of them must enter.

        Args:
            work: returns its result and a JSON fact for the others.

        Returns:
            This rank's result, and the facts of all.

        Raises:
            Exception: here whatever ``work`` raised here; on every other rank a `WorkerError` that tells of it.
        """
        if self.size == 1:
            result, fact = work()
            return result, [fact]
        try:
            result, fact = work()
        except Exception as error:  # boundary: the other ranks must get the error before they wait for this one
            self.exchange({"error": _described(error)})
            raise
        answers = self.exchange({"fact": fact})
        for rank, answer in enumerate(answers):
            if "error" in answer:
                raise WorkerError(f"rank {rank} failed: {answer['error']}")
        return result, [answer["fact"] for answer in answers]

    def on_first(self, work: Callable[[], T]) -> T:
        """Run ``work`` on rank 0 alone; its JSON result is everyone's, and so is its failure."""
        _, facts = self.together(lambda: (None, work() if self.is_first else None))
        return facts[0]

    def only_first(self, work: Callable[[], T]) -> T | None:
        """As `on_first`, for a result of any kind that stays on rank 0; the others get None."""
        result, _ = self.together(lambda: (work() if self.is_first else None, None))
        return result

    def agree(self, what: str, facts: list[Any]) -> None:
        """Raise `EngineError`, on all ranks alike, where the ranks' facts differ."""
        for rank, fact in enumerate(facts):
            if fact != facts[0]:
                raise EngineError(f"the ranks disagree about {what}", got=f"rank 0 {facts[0]!r}, rank {rank} {fact!r}")

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.sum(torch.zeros(1))

    def _reduced(self, values: Tensor, operation: Any) -> Tensor:
        """Collective: every rank, in the order in which the callers' code has it, which is the same on all."""
        if self.size == 1:
            return values
        reduced = values.clone()
        with self._told():
            dist.all_reduce(reduced, operation, group=self.group)
        return reduced

    @contextmanager
    def _told(self) -> Iterator[None]:
        """What the transport raises when a process is gone or late, in words."""
        try:
            yield
        except RuntimeError as error:
            first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise WorkerError(
                f"rank {self.rank} of {self.size} waited for the others in vain: {first}",
                fix="A rank ended or is stuck: the first traceback among the logs of all ranks is the cause "
                "(main_ppo waits for actor_rollout_ref.nccl_timeout seconds).",
            ) from error


def _described(error: Exception) -> str:
    return str(error) if isinstance(error, VerlError) else f"{type(error).__name__}: {error}"


def _to_bytes(fact: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(fact).encode()), dtype=torch.uint8)


def _from_bytes(data: Tensor) -> Any:
    return json.loads(data.numpy().tobytes())
