"""Random-number states that belong to a worker instead of to the process.

Workers that share a process would draw from the same python, numpy and torch generators, and the order of their calls
would change their numbers. Each worker has its own states, put into the process for the time of a call, so that a role
draws the same numbers whichever roles are colocated with it.
"""

from __future__ import annotations

import functools
import hashlib
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch

from verl.device import accelerator


def worker_seed(seed: int, role: str, rank: int) -> int:
    """The first seed of a worker: 63 bits from the run's seed, the role and the rank, the same on every machine."""
    digest = hashlib.blake2b(f"{seed}/{role}/{rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class _Chain:
    """One call and everything it calls; while it is alive, its nested calls may swap states without waiting."""

    alive = True


# Whichever thread runs a worker's call, for the whole of it: the generators belong to the process. Calls inside a call
# have its chain and do not take it again.
_process = threading.Lock()
_chain: ContextVar[_Chain | None] = ContextVar("rng_chain", default=None)


def in_worker_call() -> bool:
    """Whether this code runs (also through coroutines and threads that it awaits) inside a worker's call."""
    chain = _chain.get()
    return chain is not None and chain.alive


class RngState:
    """The generators' states of one worker.

    Example:
        >>> actor = RngState(seed=1)
        >>> with actor.active(): torch.rand(1)  # the process's own generators are untouched afterwards
    """

    def __init__(self, seed: int):
        self.seed = seed
        self._python: Any = random.Random(seed).getstate()
        self._numpy: Any = np.random.RandomState(seed % (1 << 32)).get_state(legacy=False)
        self._torch = torch.Generator().manual_seed(seed).get_state()
        self._device: Any = None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Run with these states; they move on, and the process gets back what it had. One call chain at a time."""
        if in_worker_call():
            with self._swapped():
                yield
            return
        with _process:
            chain = _Chain()
            token = _chain.set(chain)
            try:
                with self._swapped():
                    yield
            finally:
                chain.alive = False
                _chain.reset(token)

    @contextmanager
    def _swapped(self) -> Iterator[None]:
        before = _read()
        _write(self._python, self._numpy, self._torch, self._device)
        if before[3] is not None and self._device is None:
            _device_module().manual_seed_all(self.seed)
        try:
            yield
        finally:
            self._python, self._numpy, self._torch, self._device = _read()
            _write(*before)


def _read() -> tuple[Any, Any, torch.Tensor, Any]:
    module = _device_module()
    return (
        random.getstate(),
        np.random.get_state(legacy=False),
        torch.get_rng_state(),
        module.get_rng_state_all() if module is not None else None,
    )


def _write(python: Any, numpy: Any, cpu: torch.Tensor, device: str | torch.device) -> None:
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)
    if device is not None:
        _device_module().set_rng_state_all(device)


def _device_module() -> Any:
    """``torch.cuda`` or its like once it is in use; asking before would start the driver."""
    module = _accelerator_module()
    return module if module is not None and module.is_initialized() else None


@functools.cache
def _accelerator_module() -> Any:
    kind = accelerator()
    return None if kind is None else torch.get_device_module(kind)
