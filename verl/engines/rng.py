"""The global generators of a worker as part of its engine's state.

Dropout draws from torch's; python's and numpy's are for what a user's code may do in a worker. Every rank draws its own
numbers. Rank 0's states are called ``rng/cpu``, ``rng/cuda``, ``rng/python`` and ``rng/numpy``, as those of a
one-process engine are, and rank r's have ``/r`` behind, so that a state moves between world sizes: a rank that has none
in it gets one that follows from rank 0's.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from verl.distributed import Ranks


def gather_rng_state(device: str, ranks: Ranks) -> dict[str, Tensor]:
    """The states of all ranks, on rank 0; nothing on the others."""
    local = {"rng/cpu": torch.get_rng_state(), "rng/python": _python_state(), "rng/numpy": _numpy_state()}
    if device == "cuda":
        local["rng/cuda"] = torch.cuda.get_rng_state()
    gathered = {name: ranks.gather(state) for name, state in local.items()}
    if not ranks.is_first:
        return {}
    return {_name(name, rank): state for name, states in gathered.items() for rank, state in enumerate(states)}


def restore_rng_state(tensors: Mapping[str, Tensor], device: str, ranks: Ranks) -> None:
    """Continue from rank 0's `gather_rng_state`, which every rank is given."""
    if ranks.rank and "rng/cpu" in tensors and _name("rng/cpu", ranks.rank) not in tensors:
        seed = _derived(tensors["rng/cpu"], ranks.rank)
        torch.manual_seed(seed)  # seeds the generators of devices too
        random.seed(seed)
        np.random.seed(seed % 2**32)
        return
    for name in [name for name in tensors if name in _names_of_rank(ranks.rank)]:
        # A copy, since torch reads a generator's state from the start of its storage: a view into a file's is another.
        state = tensors[name].clone()
        if name == _name("rng/cpu", ranks.rank):
            torch.set_rng_state(state)
        elif name == _name("rng/cuda", ranks.rank) and device == "cuda":
            torch.cuda.set_rng_state(state)
        elif name == _name("rng/python", ranks.rank):
            _set_python_state(state)
        elif name == _name("rng/numpy", ranks.rank):
            _set_numpy_state(state)


def _python_state() -> Tensor:
    """Version, 625 words, and the second number of a Gaussian pair that may wait, as int64."""
    version, words, waiting = random.getstate()
    return torch.tensor([version, *words, waiting is not None, _bits(waiting or 0.0)])


def _set_python_state(state: Tensor) -> None:
    version, *words, waits, bits = state.tolist()
    random.setstate((version, tuple(words), _float(bits) if waits else None))


def _numpy_state() -> Tensor:
    """624 words, the place in them, and the waiting Gaussian, as int64."""
    _, words, place, waits, waiting = np.random.get_state(legacy=True)
    return torch.tensor([*map(int, words), place, waits, _bits(float(waiting))])


def _set_numpy_state(state: Tensor) -> None:
    *words, place, waits, bits = state.tolist()
    np.random.set_state(("MT19937", np.array(words, dtype=np.uint32), place, waits, _float(bits)))


def _bits(number: float) -> int:
    return struct.unpack("<q", struct.pack("<d", number))[0]


def _float(bits: int) -> float:
    return struct.unpack("<d", struct.pack("<q", bits))[0]


def _derived(state: Tensor, rank: int) -> int:
    digest = hashlib.blake2b(state.numpy().tobytes() + str(rank).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _names_of_rank(rank: int) -> set[str]:
    return {_name(name, rank) for name in ("rng/cpu", "rng/cuda", "rng/python", "rng/numpy")}


def _name(name: str, rank: int) -> str:
    return f"{name}/{rank}" if rank else name
