"""What a training loop needs so that the same loop runs alone and, started by torchrun, on every rank.

All ranks keep the same controller state (step, place in the data, python's and numpy's generators) because all run the
same code from the same seed: each reads the whole batch and trains on its own rows. Rank 0 alone logs, writes and
decides what depends on the disk. torch's generator differs from rank to rank, since dropout must.

How a loop uses it (``ranks`` is what `verl.distributed.join_group` gives; on one rank every call below costs nothing)::

    ctx = Spmd(ranks, seed=trainer.seed)                       # after the process's own seeding
    writer = ctx.only_main(lambda: CheckpointWriter(root))     # one lock, one writer; its error is everyone's
    with Tracking(project, name, trainer.logger if ctx.is_main else []) as tracking:
        folder = ctx.only_main(lambda: find_checkpoint(...))   # rank 0 looks; None where there is nothing
        state = ctx.on_main(lambda: CheckpointReader(folder).trainer_state() if folder else None)
        if state:
            loader.load_state_dict(state["data"])
            rng.set_rng_state(state["rng"])                    # first the controller's generators, on all ranks,
            ctx.set_generator(step)
            load_part(part, folder + "/model", contents)       # then each rank's own; each reads what it keeps
            rng.set_host_rng_state(state["rng"])               # python's and numpy's are the controller's, on all
        for batch in batches:                                  # the same batch on every rank
            metrics = part.train(ctx.share(batch)).values()    # equal on all ranks: engines reduce them
            tracking.log(metrics, step)
            partial = ctx.on_main(lambda: str(writer.begin(step, ("model",), trainer_state)))
            records = save_part(part, partial + "/model", contents)  # all ranks: each writes its part
            ctx.only_main(lambda: writer.complete({"model": records_of_all_ranks}))
        total, count = ctx.sum(nll, tokens)                    # validation: sums over everyone's share
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from verl.json_text import Json
from verl.protocol import DataProto
from verl.single_controller.base.rng import worker_seed

T = TypeVar("T")


class Peers(Protocol):
    """The ranks of the run, as `verl.distributed.Ranks` has them; handed in, because this room knows no transport."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def sum(self, values: Tensor) -> Tensor: ...
    def on_first(self, work: Callable[[], T]) -> T: ...
    def only_first(self, work: Callable[[], T]) -> T | None: ...
    def exchange(self, fact: Json) -> list[Any]: ...
    def agree(self, what: str, facts: list[Any]) -> None: ...


class Spmd:
    """This rank's view of a run in which every rank is a controller.

    Args:
        ranks: all processes of the run.
        seed: the run's; ranks other than 0 get a torch generator of their own from it, rank 0 keeps the process's, so
            that a run on one rank is the run without this class.
    """

    def __init__(self, ranks: Peers, seed: int = 0):
        self.ranks, self.seed = ranks, seed
        self.set_generator(0)
        if not self.is_main:
            logging.getLogger("verl").setLevel(logging.ERROR)  # what there is to tell, rank 0 tells

    def set_generator(self, step: int) -> None:
        """Give every rank but 0 a torch generator of its own for a run that resumes at ``step``."""
        if not self.is_main:
            torch.manual_seed(worker_seed(self.seed, f"spmd/{step}", self.ranks.rank))

    @property
    def rank(self) -> int:
        return self.ranks.rank

    @property
    def world_size(self) -> int:
        return self.ranks.size

    @property
    def is_main(self) -> bool:
        """Whether this rank logs and writes."""
        return self.ranks.rank == 0

    def share(self, batch: DataProto, balance: bool = True, together: int = 1) -> DataProto:
        """This rank's rows of a batch that every rank has: as many as any other's give or take one, and as long.

        Rows keep their order. With fewer rows than ranks some ranks get an empty batch, which engines take.

        Args:
            balance: split rows so that ranks have nearly equal tokens; else in turn, whatever their length.
            together: as many consecutive rows go to the same rank.

        Raises:
            EngineError: the ranks do not have the same batch.
        """
        if self.world_size == 1:
            return batch
        tensors: Any = batch.batch
        lengths = tensors["attention_mask"].sum(-1).tolist() if balance else [0] * len(batch)
        self.ranks.agree("the batch", self.ranks.exchange([len(batch), _fingerprint(tensors["input_ids"])]))
        units = [sum(lengths[first : first + together]) for first in range(0, len(lengths), together)]
        local_units = split_rows(units, self.world_size)[self.rank]
        return batch[[unit * together + n for unit in local_units for n in range(together)]]

    def sum(self, *numbers: float) -> list[float]:
        """Each number summed over ranks, in double precision."""
        return self.ranks.sum(torch.tensor(numbers, dtype=torch.float64)).tolist()

    def exchange(self, fact: Json) -> list[Any]:
        """A JSON value of every rank, by rank."""
        return self.ranks.exchange(fact)

    def on_main(self, work: Callable[[], T]) -> T:
        """Run ``work`` on rank 0; its JSON result is everyone's, its error is an error on every rank."""
        return self.ranks.on_first(work)

    def only_main(self, work: Callable[[], T]) -> T | None:
        """As `on_main`, for a result that stays on rank 0; the others get None."""
        return self.ranks.only_first(work)


def split_rows(lengths: list[int], num_ranks: int) -> list[list[int]]:
    """Rows to ranks, longest first, forth and back: equal counts (give or take one) and nearly equal tokens.

    Args:
        lengths: tokens per row.

    Returns:
        Per rank its rows, ascending.
    """
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    parts: list[list[int]] = [[] for _ in range(num_ranks)]
    for place, row in enumerate(order):
        turn, rank = divmod(place, num_ranks)
        parts[rank if turn % 2 == 0 else num_ranks - 1 - rank].append(row)
    return [sorted(rows) for rows in parts]


def _fingerprint(tokens: Tensor) -> str:
    return hashlib.blake2b(tokens.cpu().contiguous().numpy().tobytes(), digest_size=8).hexdigest()
