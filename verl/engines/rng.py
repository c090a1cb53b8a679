"""torch's global generators as part of an engine's state: dropout draws from them.

Every rank draws its own numbers. Rank 0's states are called ``rng/cpu`` and ``rng/cuda``, as those of a one-process
engine are, and rank r's have ``/r`` behind: a state moves between world sizes, and a rank that has none in it goes on
with its own.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from verl.distributed import Ranks


def rng_state(device: str, ranks: Ranks) -> dict[str, Tensor]:
    """The states of all ranks, on rank 0; nothing on the others."""
    own = {"rng/cpu": torch.get_rng_state()}
    if device == "cuda":
        own["rng/cuda"] = torch.cuda.get_rng_state()
    gathered = {name: ranks.gather(state) for name, state in own.items()}
    if not ranks.is_first:
        return {}
    return {_name(name, rank): state for name, states in gathered.items() for rank, state in enumerate(states)}


def set_rng_state(tensors: Mapping[str, Tensor], device: str, ranks: Ranks) -> None:
    """Continue from rank 0's `rng_state`; on the other ranks only its names and shapes are read (`mirror`)."""
    for name, state in tensors.items():
        kind, _, rank = name.removeprefix("rng/").partition("/")
        received = ranks.broadcast(state if ranks.is_first else torch.empty(state.shape, dtype=state.dtype))
        if int(rank or 0) != ranks.rank:
            continue
        if kind == "cpu":
            torch.set_rng_state(received)
        elif device == "cuda":
            torch.cuda.set_rng_state(received)


def _name(name: str, rank: int) -> str:
    return f"{name}/{rank}" if rank else name
