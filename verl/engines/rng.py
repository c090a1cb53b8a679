"""torch's global generators as part of an engine's state: dropout draws from them.

Every rank draws its own numbers. Rank 0's states are called ``rng/cpu`` and ``rng/cuda``, as those of a one-process
engine are, and rank r's have ``/r`` behind, so that a state moves between world sizes: a rank that has none in it gets
one that follows from rank 0's.
"""

from __future__ import annotations

import hashlib
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
    received = {name: _received(state, ranks) for name, state in tensors.items()}
    if ranks.rank and "rng/cpu" in received and _name("rng/cpu", ranks.rank) not in received:
        torch.manual_seed(_derived(received["rng/cpu"], ranks.rank))  # seeds the generators of devices too
        return
    for name, state in received.items():
        if name == _name("rng/cpu", ranks.rank):
            torch.set_rng_state(state)
        elif name == _name("rng/cuda", ranks.rank) and device == "cuda":
            torch.cuda.set_rng_state(state)


def _received(state: Tensor, ranks: Ranks) -> Tensor:
    return ranks.broadcast(state if ranks.is_first else torch.empty(state.shape, dtype=state.dtype))


def _derived(state: Tensor, rank: int) -> int:
    digest = hashlib.blake2b(state.numpy().tobytes() + str(rank).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _name(name: str, rank: int) -> str:
    return f"{name}/{rank}" if rank else name
