"""The controller's random-number states as JSON values, for an exact resume."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def rng_state() -> dict[str, Any]:
    """States of python's, numpy's and torch's global generators."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": [version, list(words), gauss],
        "numpy": [str(kind), [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
        "torch": bytes(torch.get_rng_state().tolist()).hex(),
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Continue from what `rng_state` returned."""
    set_host_rng_state(state)
    torch.set_rng_state(torch.tensor(list(bytes.fromhex(state["torch"])), dtype=torch.uint8))


def set_host_rng_state(state: dict[str, Any]) -> None:
    """The same for python's and numpy's generators alone."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
