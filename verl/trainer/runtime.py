"""Where a run runs: this process or a cluster; threads, seeds and logging are set here, the same in every form."""

from __future__ import annotations

import logging
import random

import numpy as np
import torch

from verl import device, env
from verl.errors import NotBuiltError


def start(seed: int, runtime: str = "local", num_processes: int = 1) -> str:
    """Prepare this process; returns the runtime that was chosen.

    Args:
        seed: master seed; python, numpy and torch start from it.
        runtime: ``auto``, ``local`` or ``ray``.
        num_processes: workers the run asks for.
    """
    level = (env.get("VERL_LOGGING_LEVEL") or "WARNING").upper()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("verl").setLevel(level)
    env.set_default("TOKENIZERS_PARALLELISM", "true")
    device.set_threads()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if runtime == "ray" or num_processes > 1:
        raise NotBuiltError(
            "runs of several processes need the Ray runtime, which is not built yet",
            key="trainer.runtime",
            got=runtime if runtime == "ray" else f"{num_processes} processes",
            fix="Use trainer.nnodes=1 and trainer.n_gpus_per_node=1.",
        )
    return "local"
